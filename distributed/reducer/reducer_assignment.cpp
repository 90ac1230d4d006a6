#include "lockstep/distributed/reducer_assignment.h"

#include <algorithm>
#include <numeric>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

/// The open bucket of one dtype and device.
struct OpenBucket {
  at::ScalarType dtype;
  at::Device device;
  size_t next_limit = 0;
  int64_t bytes = 0;
  std::vector<size_t> tensors = {};
  size_t first = 0;  ///< position of the first of `tensors`
};

OpenBucket& open_bucket_of(std::vector<OpenBucket>& open, const at::Tensor& tensor) {
  const auto same = std::find_if(open.begin(), open.end(), [&](const OpenBucket& bucket) {
    return bucket.dtype == tensor.scalar_type() && bucket.device == tensor.device();
  });
  if (same != open.end()) return *same;
  return open.emplace_back(OpenBucket{tensor.scalar_type(), tensor.device()});
}

void check_input(const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& limits,
                 const std::vector<bool>& expect_sparse,
                 const std::vector<size_t>& tensor_indices) {
  require<UsageError>(!tensors.empty() && !limits.empty(),
                      "bucket assignment: found {} tensors and {} limits, allowed: at least one",
                      tensors.size(), limits.size());
  require<UsageError>(
      (expect_sparse.empty() || expect_sparse.size() == tensors.size()) &&
          (tensor_indices.empty() || tensor_indices.size() == tensors.size()),
      "bucket assignment: found {} tensors, {} sparse flags and {} indices, allowed: one each",
      tensors.size(), expect_sparse.size(), tensor_indices.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    require<UsageError>(tensors[i].defined(), "bucket assignment: tensor {} is undefined", i);
    require<UsageError>(tensors[i].layout() == at::kStrided,
                        "bucket assignment: no support for sparse tensors; found one at {}", i);
  }
}

void sort_by_smallest(BucketAssignment& assignment) {
  std::vector<size_t> order(assignment.buckets.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return assignment.buckets[a].front() < assignment.buckets[b].front();
  });
  BucketAssignment sorted;
  for (const size_t i : order) {
    sorted.buckets.push_back(std::move(assignment.buckets[i]));
    sorted.limits.push_back(assignment.limits[i]);
  }
  assignment = std::move(sorted);
}

}  // namespace

BucketAssignment compute_bucket_assignment_by_size(const std::vector<at::Tensor>& tensors,
                                                   const std::vector<int64_t>& limits,
                                                   const std::vector<bool>& expect_sparse,
                                                   const std::vector<size_t>& tensor_indices,
                                                   std::optional<at::ScalarType> reduce_dtype) {
  check_input(tensors, limits, expect_sparse, tensor_indices);
  BucketAssignment result;
  std::vector<OpenBucket> open;
  const auto close = [&](OpenBucket& bucket) {
    result.buckets.push_back(std::move(bucket.tensors));
    result.limits.push_back(limits[bucket.next_limit]);
    bucket.next_limit = std::min(bucket.next_limit + 1, limits.size() - 1);
    bucket.bytes = 0;
    bucket.tensors.clear();
  };
  for (size_t i = 0; i < tensors.size(); ++i) {
    const size_t name = tensor_indices.empty() ? i : tensor_indices[i];
    if (!expect_sparse.empty() && expect_sparse.at(name)) {
      result.buckets.push_back({name});
      result.limits.push_back(0);
      continue;
    }
    OpenBucket& bucket = open_bucket_of(open, tensors[i]);
    if (bucket.tensors.empty()) bucket.first = i;
    bucket.tensors.push_back(name);
    bucket.bytes +=
        tensors[i].numel() *
        static_cast<int64_t>(at::elementSize(reduce_dtype.value_or(tensors[i].scalar_type())));
    if (bucket.bytes >= limits[bucket.next_limit]) close(bucket);
  }
  std::sort(open.begin(), open.end(),
            [](const OpenBucket& a, const OpenBucket& b) { return a.first < b.first; });
  for (OpenBucket& bucket : open)
    if (!bucket.tensors.empty()) close(bucket);
  if (tensor_indices.empty()) sort_by_smallest(result);
  return result;
}

void check_bucket_indices(const std::vector<std::vector<size_t>>& buckets,
                          const std::vector<NamedParameter>& parameters,
                          const std::vector<bool>& expect_sparse) {
  for (size_t p = 0; p < parameters.size(); ++p)
    require<UsageError>(parameters[p].tensor.defined(),
                        "bucket_indices: parameter {} ('{}') is an undefined tensor", p,
                        parameters[p].name);
  std::vector<bool> seen(parameters.size(), false);
  for (size_t b = 0; b < buckets.size(); ++b) {
    require<UsageError>(!buckets[b].empty(), "bucket_indices: bucket {} is empty", b);
    for (const size_t p : buckets[b]) {
      require<UsageError>(p < parameters.size(),
                          "bucket_indices: found {} in bucket {}, allowed: 0 to {}", p, b,
                          parameters.size() - 1);
      const NamedParameter& param = parameters[p];
      const at::Tensor& first = parameters[buckets[b].front()].tensor;
      require<UsageError>(!seen[p], "bucket_indices: parameter {} ('{}') is listed twice", p,
                          param.name);
      seen[p] = true;
      require<UsageError>(!expect_sparse[p] || buckets[b].size() == 1,
                          "bucket_indices: '{}' expects sparse gradients, so it must be alone; "
                          "bucket {} holds {} parameters",
                          param.name, b, buckets[b].size());
      require<UsageError>(param.tensor.scalar_type() == first.scalar_type() &&
                              param.tensor.device() == first.device(),
                          "bucket_indices: '{}' is {} on {}, but bucket {} holds {} on {}",
                          param.name, at::toString(param.tensor.scalar_type()),
                          param.tensor.device().str(), b, at::toString(first.scalar_type()),
                          first.device().str());
    }
  }
  for (size_t p = 0; p < seen.size(); ++p)
    require<UsageError>(seen[p], "bucket_indices: parameter {} ('{}') is in no bucket", p,
                        parameters[p].name);
}

}  // namespace lockstep
