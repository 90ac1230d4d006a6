#include "lockstep/distributed/mesh_buffers.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {

std::vector<MeshBufferCandidate*> in_order(std::vector<MeshBufferCandidate>& candidates) {
  std::vector<MeshBufferCandidate*> sorted;
  for (MeshBufferCandidate& candidate : candidates) sorted.push_back(&candidate);
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const MeshBufferCandidate* x, const MeshBufferCandidate* y) {
                     const RankList &a = x->key.ranks, &b = y->key.ranks;
                     return a.size() != b.size() ? a.size() > b.size() : a < b;
                   });
  return sorted;
}

at::ScalarType mesh_grad_dtype(const MeshParameter& param) {
  const std::optional<at::ScalarType> dtype = param.tensor.grad_dtype();
  require<UsageError>(dtype.has_value(),
                      "parameter '{}': the dtype of its gradient is not stated; allowed: one that "
                      "at::Tensor::set_grad_dtype() sets",
                      param.name);
  return *dtype;
}

int64_t bucket_limit(double megabytes, at::ScalarType dtype) {
  const double elements = megabytes * (1 << 20) / static_cast<double>(c10::elementSize(dtype));
  return std::max<int64_t>(static_cast<int64_t>(std::min(elements, 0x1p62)), 1);
}

int64_t expected_position(size_t index, size_t size) {
  constexpr int64_t kScale = 1 << 30;
  return static_cast<int64_t>(index) * kScale / static_cast<int64_t>(size);
}

void agree_on_positions(BufferPlan& plan) {
  const ProcessGroup& group = plan.reduction.group;
  if (group.size() == 1) return;
  const auto count = static_cast<int64_t>(plan.positions.size());
  const at::Tensor all = at::empty({group.size(), count}, at::kLong);
  all_gather(group, all.view(-1), at::tensor(plan.positions, at::kLong), "positions").wait();
  const at::Tensor most = at::amax(all, 0);
  std::copy_n(most.const_data_ptr<int64_t>(), count, plan.positions.begin());
}

}  // namespace lockstep
