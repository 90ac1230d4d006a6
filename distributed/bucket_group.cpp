#include "lockstep/distributed/bucket_group.h"

#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

bool is_finite(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return true;
  const auto [least, most] = at::aminmax(tensor);  // both are NaN where one element is
  return std::isfinite(least.item<double>()) && std::isfinite(most.item<double>());
}

void refuse_nan(const std::string& label, const Bucket& bucket) {
  if (is_finite(bucket.grads)) return;
  for (size_t i = 0; i < bucket.grad_views.size(); ++i) {
    const at::Tensor& grad = bucket.grad_views[i];
    if (is_finite(grad)) continue;
    const at::Tensor bad = at::isfinite(grad).logical_not();
    fail<UsageError>(
        "gradient sync: {}: the gradient of '{}' on this rank has {} elements of {} that are NaN "
        "or "
        "infinite, the first at {} (ddp.check_for_nan_in_grad)",
        label, bucket.parameters[i], bad.sum().item<int64_t>(), grad.numel(),
        bad.flatten().to(at::kByte).argmax().item<int64_t>());
  }
}

}  // namespace

BucketGroup::BucketGroup(std::string label, std::vector<Bucket> buckets, GradReduction reduction,
                         bool check_for_nan)
    : label_(std::move(label)),
      buckets_(std::move(buckets)),
      reduction_(std::move(reduction)),
      check_for_nan_(check_for_nan) {}

void BucketGroup::start() {
  const at::NoGradGuard no_grad;
  if (check_for_nan_)
    for (const Bucket& bucket : buckets_) refuse_nan(label_, bucket);
  const Reduction reduction(reduction_.op, reduction_.factor.numerator,
                            reduction_.factor.denominator);
  for (const Bucket& bucket : buckets_)
    works_.push_back(
        bucket.grad_shard.defined()
            ? reduce_scatter(reduction_.group, bucket.grad_shard, bucket.grads, reduction, label_)
            : all_reduce(reduction_.group, bucket.grads, reduction, label_));
}

void BucketGroup::continue_over_instances() {
  if (!reduction_.instances) return;
  const at::NoGradGuard no_grad;
  wait();
  for (const Bucket& bucket : buckets_)
    works_.push_back(all_reduce(*reduction_.instances, bucket.grad_shard, reduction_.op, label_));
}

void BucketGroup::finish() { wait(); }

void BucketGroup::wait() {
  for (Work& work : works_) work.wait();
  works_.clear();
}

}  // namespace lockstep
