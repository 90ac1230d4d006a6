#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

namespace lockstep {

class KeyValueCache;

/// Where the tokens of a micro-batch stand: in their sequences, and among all samples of the run;
/// and what attention has kept of the tokens before them.
struct TokenPositions {
  /// [sequence] of int64, for the sequence that this rank holds before sequence parallelism cuts
  /// it. Undefined: 0, 1, ...
  at::Tensor positions = {};
  /// Number of the first sequence of the micro-batch among all samples of the run; the others
  /// follow it. Dropout draws the same numbers for the same sample and position on every layout, so
  /// a training loop must count on: with the same number every step drops the same elements.
  int64_t first_sample = 0;
  /// The same number as int64 [] on the device, for a pass that is recorded once and launched for
  /// many micro-batches. Undefined: first_sample holds.
  at::Tensor first_sample_on_device = {};
  /// Keys and values of the tokens before these, to which attention adds those of these; null:
  /// these tokens are whole sequences.
  std::shared_ptr<KeyValueCache> cache = {};
};

}  // namespace lockstep
