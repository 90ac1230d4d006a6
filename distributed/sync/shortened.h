#pragma once

// Internal.

#include <algorithm>
#include <string>
#include <vector>

#include "lockstep/core/check.h"

namespace lockstep {

/// "a, b, and 3 more": the first twenty of `names`, for an error.
inline std::string shortened(const std::vector<std::string>& names) {
  constexpr size_t kMaxNames = 20;
  const size_t shown = std::min(names.size(), kMaxNames);
  const auto end = names.begin() + static_cast<std::ptrdiff_t>(shown);
  std::string text = fmt::format("{}", fmt::join(names.begin(), end, ", "));
  if (shown < names.size()) text += fmt::format(", and {} more", names.size() - shown);
  return text;
}

}  // namespace lockstep
