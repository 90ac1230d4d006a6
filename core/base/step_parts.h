#pragma once

#include <array>
#include <cstddef>
#include <numeric>

namespace lockstep {

/// Parts of a training step's time on one rank.
enum class StepPart {
  forward,
  backward,       ///< recomputed activations included
  communication,  ///< waiting for other ranks: what no computation hides
  optimizer,      ///< zeroing and scaling gradients, norm, clipping, update
  data,           ///< until the next micro-batch is available
  other
};
inline constexpr size_t kStepParts = 6;

/// "forward", ..., "other".
constexpr const char* name_of(StepPart part) {
  constexpr std::array<const char*, kStepParts> kNames = {"forward",   "backward", "communication",
                                                          "optimizer", "data",     "other"};
  return kNames.at(static_cast<size_t>(part));
}

/// How long a training step spent in each of its parts, in milliseconds. Every moment counts
/// towards one part.
struct StepTimes {
  std::array<double, kStepParts> ms = {};

  double& operator[](StepPart part) { return ms.at(static_cast<size_t>(part)); }
  double operator[](StepPart part) const { return ms.at(static_cast<size_t>(part)); }
  double total() const { return std::accumulate(ms.begin(), ms.end(), 0.0); }
};

}  // namespace lockstep
