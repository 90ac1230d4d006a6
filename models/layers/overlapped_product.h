#pragma once

// Internal.

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/models/linear_function.h"

/// The forwards of parallel_linear() that communicate in parts, each beside the product of another
/// one. Parts are cut along dimension 0, the sequence, and have the same positions of each rank's
/// chunk, so that what a reduce-scatter of a part leaves is rows of the rank's own chunk. The parts
/// of a layer carry one label.
namespace lockstep {

/// Of a rank's chunk, or of all positions where an all-reduce sums. More hide more of the messages,
/// but make products smaller, and slower: `lockstep plan time` says that two cost least.
inline constexpr int64_t kOverlapParts = 2;

struct SequencePart {
  int64_t first = 0, count = 0;  ///< positions
};

/// kOverlapParts of them, whose sizes differ by one at most; of fewer positions one each.
std::vector<SequencePart> sequence_parts(int64_t positions);

/// What a forward multiplies by.
struct ProductFactor {
  at::Tensor matrix;               ///< [out, in]
  std::optional<at::Tensor> bias;  ///< [out]
  bool notes_largest = false;      ///< the operands count for the scales of options.fp8
};

/// `chunk` [positions, ..., in] -> [ranks * positions, ..., out]: the chunks of all ranks, times
/// the factor. An all-gather of each part is started at once; the rank multiplies its own chunk,
/// then what the others have of each part, once it is there.
at::Tensor gathered_product(const at::Tensor& chunk, const ProductFactor& factor,
                            const ParallelLinearOptions& options);

/// `x` [sequence, ..., in] times the factor, which has no bias, summed over the ranks: [sequence,
/// ..., out] by an all-reduce of each part, or this rank's [sequence / ranks, ..., out] by a
/// reduce-scatter, started as soon as the part is computed. UsageError, by the layer's name, for a
/// sequence that does not divide by the ranks then.
at::Tensor summed_product(const at::Tensor& x, const ProductFactor& factor,
                          const ParallelLinearOptions& options);

}  // namespace lockstep
