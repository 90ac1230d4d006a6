#pragma once

// Internal.

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/parameters.h"

namespace lockstep {

/// Which parameters are reduced together, as positions in a list, and the limit that each bucket
/// was filled up to.
struct BucketAssignment {
  std::vector<std::vector<size_t>> buckets;
  std::vector<int64_t> limits;  ///< bytes; 0 for a parameter with sparse gradients
};

/// Goes through `tensors` in order and puts each into the open bucket of its (dtype, device). A
/// bucket closes once it holds at least the current limit, so it may hold more; then the next of
/// `limits` (bytes, at least one) applies to that dtype and device; the last one applies to all
/// further buckets. A tensor for which `expect_sparse` is true has a bucket of its own. Bytes are
/// those of the tensors, or of as many elements of `reduce_dtype`.
///
/// `tensor_indices` names the tensors (the order in which gradients became ready): the result and
/// `expect_sparse` use these names, and buckets are listed in the order in which they closed,
/// followed by those that never filled up, ordered by their first tensor. Without it, tensors are
/// named by position and buckets are sorted by their smallest name. Both orders are the same on
/// every rank; nothing depends on a hash.
///
/// UsageError: no tensors, no limits, lists of different lengths, a sparse tensor.
BucketAssignment compute_bucket_assignment_by_size(const std::vector<at::Tensor>& tensors,
                                                   const std::vector<int64_t>& limits,
                                                   const std::vector<bool>& expect_sparse = {},
                                                   const std::vector<size_t>& tensor_indices = {},
                                                   std::optional<at::ScalarType> reduce_dtype = {});

/// Throws UsageError unless `buckets` holds every position of `parameters` exactly once, no bucket
/// is empty, the parameters of a bucket share dtype and device, and one that expects sparse
/// gradients is alone.
void check_bucket_indices(const std::vector<std::vector<size_t>>& buckets,
                          const std::vector<NamedParameter>& parameters,
                          const std::vector<bool>& expect_sparse);

}  // namespace lockstep
