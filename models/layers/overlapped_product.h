#pragma once

// Internal.

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/models/linear_function.h"

/// The forwards of parallel_linear() that communicate in parts, each overlapped with the product of
/// another part. Parts are cut along dimension 0, the sequence, and have the same positions of each
/// rank's chunk, so that a reduce-scatter of a part leaves rows of the rank's own chunk. The parts
/// of a layer share one label.
namespace lockstep {

/// The number of parts of a rank's chunk, or of all positions if an all-reduce sums. More parts
/// hide more of the messages, but make products smaller and slower; `lockstep plan time` says that
/// two cost least.
inline constexpr int64_t kOverlapParts = 2;

struct SequencePart {
  int64_t first = 0, count = 0;  ///< positions
};

/// kOverlapParts parts, whose sizes differ by one at most; with fewer positions, one part for each.
std::vector<SequencePart> sequence_parts(int64_t positions);

/// The factor of a forward's product.
struct ProductFactor {
  at::Tensor matrix;               ///< [out, in]
  std::optional<at::Tensor> bias;  ///< [out]
  bool notes_largest = false;      ///< the operands count for the scales of options.fp8
};

/// `chunk` [positions, ..., in] -> [ranks * positions, ..., out]: the chunks of all ranks, times
/// the factor. An all-gather of each part is started at once; the rank multiplies its own chunk,
/// then the other ranks' share of each part once it has arrived.
at::Tensor gathered_product(const at::Tensor& chunk, const ProductFactor& factor,
                            const ParallelLinearOptions& options);

/// `x` [sequence, ..., in] times the factor, which has no bias, summed over the ranks: [sequence,
/// ..., out] by an all-reduce of each part, or this rank's [sequence / ranks, ..., out] by a
/// reduce-scatter, started as soon as the part is computed. UsageError, naming the layer, for a
/// sequence that is not divisible by the ranks in that case.
at::Tensor summed_product(const at::Tensor& x, const ProductFactor& factor,
                          const ParallelLinearOptions& options);

}  // namespace lockstep
