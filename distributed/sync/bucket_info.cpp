#include "lockstep/distributed/bucket_info.h"

#include "lockstep/core/check.h"
#include "lockstep/distributed/bucket_group.h"

namespace lockstep {

std::string to_string(const GradOperation& operation) {
  using Kind = GradOperation::Kind;
  switch (operation.kind) {
    case Kind::all_reduce:
      return fmt::format("all-reduce {}", to_string(operation.op));
    case Kind::reduce_scatter:
      return fmt::format("reduce-scatter {}", to_string(operation.op));
    case Kind::sparse_all_reduce:
      return fmt::format("sparse all-reduce {}", to_string(operation.op));
    case Kind::broadcast:
      return "broadcast";
    case Kind::hook:
      break;
  }
  return "hook";
}

std::string to_string(const std::vector<BucketInfo>& buckets) {
  std::string text;
  for (const BucketInfo& info : buckets)
    text += fmt::format("{}: {} over {}, {} elements of {}, {} bytes, {} parameters\n", info.label,
                        info.hook.empty() ? to_string(info.operation) : info.hook,
                        info.group.to_string(), info.numel, at::toString(info.dtype), info.bytes,
                        info.parameters.size());
  return text;
}

BucketReduction reduction_of(const BucketGroup& group, const Bucket& bucket) {
  const GradReduction& reduction = group.reduction();
  const bool cut = group.reduces_shards(bucket);
  const at::Tensor& reduced = cut ? bucket.grad_shard : bucket.grads;
  using Kind = GradOperation::Kind;
  return {.group = reduction.group,
          .operation = {cut ? Kind::reduce_scatter : Kind::all_reduce, reduction.op},
          .bytes = bucket.bytes(),
          .num_parameters = static_cast<int64_t>(bucket.parameters.size()),
          .instances = reduction.instances,
          .instance_bytes = reduction.instances ? static_cast<int64_t>(reduced.nbytes()) : 0};
}

BucketInfo info_of(const BucketGroup& group, const Bucket& bucket) {
  return {reduction_of(group, bucket), group.label(), bucket.grads.scalar_type(),
          bucket.grads.numel(), bucket.parameters};
}

}  // namespace lockstep
