#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

/// Which ranks keep in-memory copies of which ranks' state, and which copies are left after a loss:
/// integer arithmetic, without libtorch.
namespace lockstep {

/// The ranks that keep a copy of each rank's part: `replicas` of them, or all others if there are
/// fewer. `hosts[rank]` names the host of a rank. Ranks on other hosts come first, starting with
/// the next host; then those on the same host, the next rank first. If all hosts have the same
/// number of ranks, every rank keeps as many copies as there are of its own part.
std::vector<std::vector<int64_t>> copy_holders(const std::vector<std::string>& hosts,
                                               int64_t replicas);

/// Identifies a copy of the state of all ranks: the ranks' round, from 0, and the number of the
/// copy in it. A later copy is greater.
struct CopyId {
  int64_t round = 0;
  int64_t number = 0;
  auto operator<=>(const CopyId&) const = default;
};

/// The parts of one copy that a rank has.
struct HeldCopy {
  CopyId id;
  int64_t iteration = 0;
  int64_t world_size = 0;      ///< ranks that the state was cut for
  std::vector<int64_t> parts;  ///< the ranks whose part it has, whole
  bool operator==(const HeldCopy&) const = default;
};

/// To a text of one line each, and back. FileError if the text is not valid.
std::string format_held_copies(const std::vector<HeldCopy>& copies);
std::vector<HeldCopy> parse_held_copies(const std::string& text);

/// A part that no rank has.
struct LostPart {
  int64_t iteration = 0;
  int64_t rank = 0;  ///< of those that the state was cut for
};

/// The newest copy that has every part.
struct CopyChoice {
  std::optional<CopyId> id;  ///< empty: there is none
  int64_t iteration = 0;
  std::vector<std::vector<int64_t>> holders;  ///< for each part, the present ranks that have it
  /// If there is none: a part that the oldest copy lacks.
  std::optional<LostPart> lost;
};

/// Chooses among what the ranks have. Copies of iterations before `least` do not count, nor do
/// those made before `first`.
CopyChoice choose_copy(const std::vector<std::vector<HeldCopy>>& of_ranks, int64_t least,
                       const CopyId& first = {});

/// Which `count` of the ranks continue if the others become spares, ascending: the first ones that
/// together have the newest whole copy. It leaves out one rank after the other, so with several
/// spares it may miss such ranks; then it returns the first ones.
std::vector<size_t> ranks_that_go_on(const std::vector<std::vector<HeldCopy>>& of_ranks,
                                     size_t count);

}  // namespace lockstep
