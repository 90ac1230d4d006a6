#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

/// Which ranks form a group: pure integer arithmetic. Semantics and orders are those of Megatron
/// Core's parallel_state.RankGenerator.
namespace lockstep {

/// Ranks of one group, in group order.
using RankList = std::vector<int64_t>;

/// Sizes of the axes of one grid of ranks.
struct GridSizes {
  int64_t tp = 1;
  int64_t cp = 1;
  int64_t ep = 1;
  int64_t dp = 1;
  int64_t pp = 1;

  int64_t world() const { return tp * cp * ep * dp * pp; }
};

/// All groups of the ranks 0 ... product(sizes) - 1 along the dimensions that `mask` marks.
/// Dimension 0 varies fastest. Groups are listed in the order of their unmarked coordinates, ranks
/// in a group in the order of their marked ones. There is no table: any group, and the group of any
/// rank, is computed in time proportional to the number of dimensions, so a world of a million
/// ranks costs nothing until it is listed.
class GroupSet {
 public:
  GroupSet(const std::vector<int64_t>& sizes, const std::vector<bool>& mask);

  /// Number of groups.
  int64_t count() const { return count_; }
  /// Ranks in each group.
  int64_t size() const { return size_; }
  /// Group `index` (< count()).
  RankList group(int64_t index) const;
  /// Index of the group that holds `rank`.
  int64_t index_of(int64_t rank) const { return position(unmarked_, rank); }
  /// Position of `rank` in its group.
  int64_t position_of(int64_t rank) const { return position(marked_, rank); }

  /// The rank at `position` of group `index` is first(index) + offset(position). Neither is
  /// checked.
  int64_t first(int64_t index) const { return place(unmarked_, index); }
  int64_t offset(int64_t position) const { return place(marked_, position); }

  /// The same groups in the same order.
  bool operator==(const GroupSet&) const = default;

 private:
  /// Neighbouring dimensions with equal marks are merged, those of size 1 are left out.
  struct Dimension {
    int64_t size;
    int64_t stride;
    bool operator==(const Dimension&) const = default;
  };
  static int64_t place(const std::vector<Dimension>& dimensions, int64_t position);
  int64_t position(const std::vector<Dimension>& dimensions, int64_t rank) const;

  std::vector<Dimension> marked_;
  std::vector<Dimension> unmarked_;
  int64_t count_ = 1;
  int64_t size_ = 1;
};

/// Groups of one grid, by axis names.
class RankGenerator {
 public:
  /// `order` lists axes from the fastest varying to the slowest, as in "tp-cp-ep-dp-pp". Axes of
  /// size 1 may be left out. ConfigError: a size below 1, an unknown axis, an axis twice, an axis
  /// of size > 1 that is missing, ep > 1 together with cp > 1.
  RankGenerator(const GridSizes& sizes, std::string_view order);

  /// The groups along the axes of `token`, as in "tp-dp". The order of its axes does not matter.
  GroupSet groups(std::string_view token) const;

  /// The order with the axes that were left out appended.
  const std::string& order() const { return order_; }

 private:
  std::vector<std::string> axes_;
  std::vector<int64_t> sizes_;
  std::string order_;
};

}  // namespace lockstep
