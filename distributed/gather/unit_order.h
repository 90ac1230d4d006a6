#pragma once

// Internal.

#include <cstddef>
#include <optional>
#include <vector>

namespace lockstep {

/// Which of `count` units of a model is used next, as far as the previous step shows. All ranks
/// that run the same program get the same answers.
class UnitOrder {
 public:
  explicit UnitOrder(size_t count) : count_(count) {}

  /// A training step begins, or is over.
  void begin_step();
  void end_step();

  /// Notes that `unit` is used now, after a different one. Returns the unit that followed it at
  /// this place in the previous step's order; none if the order changed or nothing followed.
  /// Between steps: number_after().
  std::optional<size_t> next_after(size_t unit);
  /// The unit with the next number; none after the last one.
  std::optional<size_t> number_after(size_t unit) const;
  /// The unit with which the next step begins.
  size_t first() const { return before_.empty() ? 0 : before_.front(); }

 private:
  size_t count_;
  bool in_step_ = false;
  std::vector<size_t> now_, before_;
  size_t position_ = 0;  ///< in before_: what was not used yet
};

}  // namespace lockstep
