#include "lockstep/distributed/bucket_group.h"

#include <cmath>
#include <functional>
#include <utility>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/narrow_dtype.h"
#include "lockstep/distributed/owned_grads.h"

namespace lockstep {
namespace {

struct Extremes {
  double least = 0, most = 0;  ///< both are NaN if an element is
};

Extremes extremes_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  const auto [least, most] = at::aminmax(tensor);
  return {least.item<double>(), most.item<double>()};
}

/// One kind of bad gradient to look for.
struct Fault {
  const char* text;
  const char* field;
  std::function<bool(const Extremes&)> possible;  ///< whether elements() may find some
  std::function<at::Tensor(const at::Tensor&)> elements;
};

std::vector<Fault> faults_of(const GradChecks& checks) {
  std::vector<Fault> faults;
  if (checks.nan)
    faults.push_back(
        {"NaN or infinite", "ddp.check_for_nan_in_grad",
         [](const Extremes& e) { return !std::isfinite(e.least) || !std::isfinite(e.most); },
         [](const at::Tensor& grad) { return at::isfinite(grad).logical_not(); }});
  if (checks.large) {
    const double limit = *checks.large;
    faults.push_back(
        {"larger than ddp.large_grad_threshold", "ddp.check_for_large_grads",
         // An element that is NaN hides the others.
         [limit](const Extremes& e) { return !(e.least >= -limit && e.most <= limit); },
         [limit](const at::Tensor& grad) { return grad.to(at::kDouble).abs().gt(limit); }});
  }
  return faults;
}

void refuse(const Fault& fault, const std::string& label, const Bucket& bucket) {
  for (size_t i = 0; i < bucket.grad_views.size(); ++i) {
    const at::Tensor& grad = bucket.grad_views[i];
    if (!fault.possible(extremes_of(grad))) continue;
    const at::Tensor bad = fault.elements(grad).flatten();
    const int64_t count = bad.sum().item<int64_t>();
    if (count == 0) continue;
    const int64_t first = bad.to(at::kByte).argmax().item<int64_t>();
    fail<UsageError>(
        "gradient sync: {}: the gradient of '{}' on this rank has {} elements of {} that are {}, "
        "the first at {}: {} ({})",
        label, bucket.parameters[i], count, grad.numel(), fault.text, first,
        grad.flatten()[first].item<double>(), fault.field);
  }
}

void check_gradients(const GradChecks& checks, const std::string& label, const Bucket& bucket) {
  const std::vector<Fault> faults = faults_of(checks);
  if (faults.empty()) return;
  const Extremes extremes = extremes_of(bucket.grads);
  for (const Fault& fault : faults)
    if (fault.possible(extremes)) refuse(fault, label, bucket);
}

}  // namespace

BucketGroup::BucketGroup(std::string label, std::vector<Bucket> buckets, GradReduction reduction,
                         GradChecks checks)
    : label_(std::move(label)),
      buckets_(std::move(buckets)),
      reduction_(std::move(reduction)),
      checks_(checks) {}

void BucketGroup::start() {
  const at::NoGradGuard no_grad;
  for (const Bucket& bucket : buckets_)
    if (bucket.lender) bucket.lender->check_grads_attached("zero_grad_buffer");
  complete_lent();
  for (const Bucket& bucket : buckets_) check_gradients(checks_, label_, bucket);
  launch();
}

void BucketGroup::start_with_nan() {
  const at::NoGradGuard no_grad;
  complete_lent();
  for (const Bucket& bucket : buckets_) at::Tensor(bucket.grads).fill_(std::nan(""));
  launch();
}

void BucketGroup::complete_lent() {
  for (const Bucket& bucket : buckets_)
    if (bucket.lender) bucket.lender->complete_grads();
}

void BucketGroup::free_lent() {
  if (!std::exchange(lent_, false)) return;
  for (const Bucket& bucket : buckets_)
    if (bucket.lender) bucket.lender->close_grads();
}

void BucketGroup::launch() {
  Reduction reduction(reduction_.op, reduction_.factor.numerator, reduction_.factor.denominator);
  reduction.consumes_input = true;
  lent_ = true;
  for (const Bucket& bucket : buckets_) {
    if (!reduces_shards(bucket))
      works_.push_back(all_reduce(reduction_.group, bucket.grads, reduction, label_));
    else if (reduction_.accumulate_in_fp32 && is_narrow(bucket.grads.scalar_type()))
      start_exchange(bucket);
    else
      works_.push_back(
          reduce_scatter(reduction_.group, bucket.grad_shard, bucket.grads, reduction, label_));
  }
}

void BucketGroup::start_exchange(const Bucket& bucket) {
  const at::Tensor terms =
      at::empty({reduction_.group.size(), bucket.grad_shard.numel()}, bucket.grads.options());
  exchanges_.push_back({terms, bucket.grad_shard});
  works_.push_back(all_to_all(reduction_.group, terms, bucket.grads.view_as(terms), label_));
}

void BucketGroup::add_exchanged() {
  const at::NoGradGuard no_grad;
  const auto numerator = static_cast<double>(reduction_.factor.numerator);
  const auto denominator = static_cast<double>(reduction_.factor.denominator);
  for (const Exchange& exchange : exchanges_) {
    at::Tensor sum = exchange.terms[0].to(at::kFloat);
    for (int64_t rank = 1; rank < exchange.terms.size(0); ++rank) sum.add_(exchange.terms[rank]);
    if (numerator != denominator) sum.mul_(numerator / denominator);
    at::Tensor(exchange.shard).copy_(sum);
  }
  exchanges_.clear();
}

void BucketGroup::continue_over_instances() {
  if (!reduction_.instances) return;
  const at::NoGradGuard no_grad;
  finish();
  for (const Bucket& bucket : buckets_)
    works_.push_back(all_reduce(*reduction_.instances,
                                reduces_shards(bucket) ? bucket.grad_shard : bucket.grads,
                                reduction_.op, label_));
}

void BucketGroup::finish() {
  for (Work& work : works_) work.wait();
  works_.clear();
  add_exchanged();
  free_lent();
}

}  // namespace lockstep
