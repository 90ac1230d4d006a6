#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/parallel_state/collective_operation.h"
#include "lockstep/parallel_state/label_table.h"

/// A record of what one rank did in one group, so that ranks can be compared.
namespace lockstep {

/// One collective of a rank, in words.
struct CollectiveEntry {
  int64_t sequence = 0;   ///< from 1, within the group
  int64_t step = 0;       ///< training step, as last set in the guard
  std::string operation;  ///< "all_reduce (sum)"
  std::string label;      ///< what is communicated: "bucket 3"
  int64_t numel = 0;      ///< elements of this rank's input; -1 if ranks may differ in it
  std::string dtype;      ///< "Float"

  /// Whether two ranks did the same; the step may differ.
  bool same_operation(const CollectiveEntry& other) const;
  /// "all_reduce (sum) of bucket 3, 1024 x Float (step 12)"
  std::string to_string() const;
};

/// The collectives of one rank in one group: their number, a fingerprint of all of them, and the
/// last ones. Thread-safe. Adding one costs some tens of nanoseconds and creates no text, except
/// for a label that is new.
class CollectiveLedger {
 public:
  /// The number of last entries that are kept.
  static constexpr size_t kKept = 64;

  struct State {
    int64_t sequence = 0;      ///< number of collectives
    uint64_t fingerprint = 0;  ///< of all of them, in order
    bool operator==(const State&) const = default;
  };

  struct Added {
    uint64_t identity = 0;  ///< a hash of this one call
    SharedLabel label;
  };
  /// `label` and `dtype` need not outlive the call.
  Added add(int64_t step, const CollectiveOperation& operation, std::string_view label,
            int64_t numel, std::string_view dtype);
  /// `prefix` + `label`, for a call that is not entered and for callers that pass it to many calls.
  SharedLabel share_label(std::string_view prefix, std::string_view label);
  State state() const;

  /// The kept entries in words, oldest first.
  std::vector<CollectiveEntry> entries() const;

  /// The entries as text for another rank, and the reverse. parse() drops lines that it cannot
  /// read.
  std::string serialize() const;
  static std::vector<CollectiveEntry> parse(const std::string& text);

 private:
  struct Kept {
    int64_t sequence = 0, step = 0;
    CollectiveOperation operation;
    SharedLabel label;
    int64_t numel = 0;
    std::string dtype;
  };

  mutable std::mutex mutex_;
  State state_;
  std::vector<Kept> ring_;
  LabelTable labels_;
};

/// A hash of one call, the same on all ranks that make it: the hash of the operation's text, which
/// is not actually built, or of another text in its place.
uint64_t identity_of_call(const CollectiveOperation& operation, std::string_view label,
                          int64_t numel, std::string_view dtype);
uint64_t identity_of_call(std::string_view operation, std::string_view label, int64_t numel,
                          std::string_view dtype);

/// The report of a rank of a group about itself.
struct RankAccount {
  int64_t rank = 0;                      ///< in the world
  bool answered = false;                 ///< it reported anything
  std::vector<CollectiveEntry> entries;  ///< in the group, oldest first
  std::string elsewhere = {};            ///< what it waits for, or that it has ended; may be empty
};

/// The first collective in which the ranks of a group did not do the same: which rank did what
/// instead, did not arrive, or did not answer. Empty if the accounts agree.
std::optional<std::string> first_difference(const std::vector<RankAccount>& accounts);

}  // namespace lockstep
