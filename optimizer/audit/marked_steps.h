#pragma once

// Internal: steps whose local gradients are integers that distinguish ranks and parameters, and
// what is read from the results.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/parameters.h"
#include "lockstep/optimizer/audit_report.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Factors are multiples of 1 / kMarkerResolution.
inline constexpr int64_t kMarkerResolution = 48;

/// The gradient of one parameter on this rank.
struct MarkedGradient {
  const NamedParameter* param;
  int64_t bytes;  ///< of an element, of the narrowest dtype on its way
  /// The part of it that this rank holds after a step, a view; empty if it holds none; undefined if
  /// the step has left none.
  std::function<at::Tensor()> held;
};

/// The local gradient, the same for all elements of gradients[i].
using MarkerOf = std::function<double(size_t i)>;

struct MarkedLoop {
  const ParallelState& state;
  bool divides_by_tokens;
  int64_t averaged_ranks;  ///< by which gradients are averaged; 1: they are not
  std::vector<MarkedGradient> gradients;
  /// A step up to the optimizer whose local gradients are `marker` and in which this rank counts
  /// `tokens`.
  std::function<void(const MarkerOf& marker, double tokens)> step;
};

struct MarkerReading {
  std::vector<AuditTerms> terms = {};
  std::vector<int64_t> token_ranks = {};
  std::string problem = {};
};

/// The reading of each gradient. Collective over all ranks.
std::vector<MarkerReading> read_markers(const MarkedLoop& loop);

/// One more step in which all ranks have the same marker: a gradient that is not what `readings`
/// say becomes a problem, whose text includes `how`.
void check_readings(const MarkedLoop& loop, std::vector<MarkerReading>& readings, const char* how);

/// The elements that `norm`, 0-dim, counts if each gradient that is held is 1.
int64_t elements_in_norm(const MarkedLoop& loop, const std::function<at::Tensor()>& norm);

/// Sets every gradient that is held to `value`.
void fill_held(const MarkedLoop& loop, double value);

}  // namespace lockstep
