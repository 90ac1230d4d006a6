#include "lockstep/distributed/unit_order.h"

#include <algorithm>
#include <utility>

namespace lockstep {

void UnitOrder::begin_step() {
  now_.clear();
  position_ = 0;
  in_step_ = true;
}

void UnitOrder::end_step() {
  if (in_step_ && !now_.empty()) before_ = std::exchange(now_, {});
  in_step_ = false;
}

std::optional<size_t> UnitOrder::number_after(size_t unit) const {
  return unit + 1 < count_ ? std::optional(unit + 1) : std::nullopt;
}

std::optional<size_t> UnitOrder::next_after(size_t unit) {
  if (!in_step_) return number_after(unit);
  now_.push_back(unit);
  const auto found =
      std::find(before_.begin() + static_cast<std::ptrdiff_t>(position_), before_.end(), unit);
  if (found == before_.end()) return std::nullopt;
  position_ = static_cast<size_t>(found - before_.begin()) + 1;
  return position_ < before_.size() ? std::optional(before_[position_]) : std::nullopt;
}

}  // namespace lockstep
