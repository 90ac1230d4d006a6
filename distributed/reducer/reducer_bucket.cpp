#include "lockstep/distributed/reducer_bucket.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

at::Tensor empty_sparse(const at::Tensor& like) {
  std::vector<int64_t> values = like.sizes().vec();
  values[0] = 0;
  const at::TensorOptions options = like.options().requires_grad(false);
  return at::sparse_coo_tensor(at::empty({1, 0}, options.dtype(at::kLong)),
                               at::empty(values, options), like.sizes(),
                               options.layout(at::kSparse), /*is_coalesced=*/true);
}

}  // namespace

ReducerBucket::ReducerBucket(std::vector<NamedParameter> params, bool sparse,
                             const Settings& settings, size_t index, bool is_last)
    : params_(std::make_shared<const std::vector<NamedParameter>>(std::move(params))),
      settings_(settings),
      index_(index),
      is_last_(is_last),
      kept_(params_->size()) {
  if (sparse) return;
  // A buffer lays out its parameters from the last to the first.
  std::vector<NamedParameter> reversed(params_->rbegin(), params_->rend());
  const at::ScalarType dtype =
      settings.reduce_dtype.value_or(params_->front().tensor.scalar_type());
  buffer_ = std::make_unique<ParamAndGradBuffer>(std::move(reversed), dtype, LayoutOptions(), 0,
                                                 BufferContents::unattached_grads);
  Bucket bucket{.grads = buffer_->grad_data()};
  for (size_t place = 0; place < params_->size(); ++place) {
    bucket.parameters.push_back((*params_)[place].name);
    bucket.grad_views.push_back(expected_grad(place));
  }
  std::vector<Bucket> buckets;
  buckets.push_back(std::move(bucket));
  group_.emplace(label(), std::move(buckets), GradReduction{.group = settings.group},
                 settings.check_for_nan);
}

int64_t ReducerBucket::bytes() const {
  return static_cast<int64_t>(buffer_ ? buffer_->grad_data().nbytes()
                                      : params().front().tensor.nbytes());
}

BucketInfo ReducerBucket::info() const {
  if (group_) return info_of(*group_, group_->buckets().front());
  const NamedParameter& param = params().front();
  return {{.group = settings_.group,
           .operation = {GradOperation::Kind::sparse_all_reduce},
           .bytes = bytes(),
           .num_parameters = 1},
          label(),
          dtype(),
          param.tensor.numel(),
          {param.name}};
}

const at::Tensor& ReducerBucket::expected_grad(size_t place) const {
  static const at::Tensor kNone;
  return buffer_ ? buffer_->grad_view(buffer_index(place)) : kNone;
}

GradBucket ReducerBucket::grad_bucket(int64_t divisor, const at::Tensor& sparse_rows) const {
  return {.index = static_cast<int64_t>(index_),
          .is_last = is_last_,
          .buffer = buffer_ ? buffer_->grad_data() : sparse_,
          .parameters = params_,
          .group = settings_.group,
          .divisor = divisor,
          .sparse_rows = sparse_rows};
}

void ReducerBucket::take(size_t place, bool in_place) {
  if (in_place && as_view()) [[likely]]
    return;
  if (buffer_ && as_view()) return buffer_->adopt_grad(buffer_index(place));
  if (buffer_) return buffer_->copy_grad_in(buffer_index(place));
  const at::Tensor& grad = params()[place].tensor.grad();
  require<UsageError>(grad.defined() && grad.layout() == at::kSparse,
                      "gradient sync: the gradient of '{}' is dense, allowed: sparse gradients, "
                      "because it is one of sparse_parameters",
                      params()[place].name);
  sparse_ = grad.detach().coalesce();
}

void ReducerBucket::take_unused(size_t place) {
  const at::NoGradGuard no_grad;
  const at::Tensor& grad = params()[place].tensor.grad();
  if (!buffer_) {
    sparse_ = grad.defined() ? grad.detach().coalesce() : empty_sparse(params()[place].tensor);
    return;
  }
  const at::Tensor& slot = expected_grad(place);
  if (!grad.defined()) {
    at::Tensor(slot).zero_();
  } else {
    take(place, grad.is_same(slot));
    if (as_view()) kept_[place] = slot.clone();
  }
}

void ReducerBucket::take_zeros() {
  if (buffer_)
    at::Tensor(buffer_->grad_data()).zero_();
  else
    sparse_ = empty_sparse(params().front().tensor);
}

void ReducerBucket::refuse_sparse_not_finite() const {
  const at::Tensor values = sparse_.values();
  const at::Tensor bad = at::isfinite(values).logical_not().flatten();
  const int64_t count = bad.sum().item<int64_t>();
  if (count == 0) return;
  const int64_t first = bad.to(at::kByte).argmax().item<int64_t>();
  const int64_t entry = first / (values.numel() / values.size(0));
  fail<UsageError>(
      "gradient sync: {}: the gradient of '{}' on this rank has {} elements of {} that are NaN or "
      "infinite, the first in row {}: {} (check_for_nan_in_grad)",
      label(), params().front().name, count, values.numel(),
      sparse_.indices()[0][entry].item<int64_t>(), values.flatten()[first].item<double>());
}

void ReducerBucket::start(CommHook* hook, int64_t divisor, const at::Tensor& sparse_rows) {
  const at::NoGradGuard no_grad;
  if (!hook && group_) {
    group_->set_factor({1, divisor});
    group_->start();
    return;
  }
  if (!hook && settings_.check_for_nan) refuse_sparse_not_finite();
  AllReduceHook plain;
  finish_ = (hook ? *hook : plain).start(grad_bucket(divisor, sparse_rows));
  require<UsageError>(finish_ != nullptr, "communication hook '{}': returned nothing to wait for",
                      hook ? hook->name() : plain.name());
}

void ReducerBucket::refuse_other_than_sparse(const at::Tensor& result) const {
  const at::Tensor& param = params().front().tensor;
  require<UsageError>(
      result.defined() && result.layout() == at::kSparse && result.sizes() == param.sizes() &&
          result.scalar_type() == param.scalar_type(),
      "communication hook: returned {} for {}, allowed: a sparse tensor [{}] of {}",
      result.defined()
          ? fmt::format("a {} tensor [{}] of {}",
                        result.layout() == at::kSparse ? "sparse" : "dense",
                        fmt::join(result.sizes(), ", "), at::toString(result.scalar_type()))
          : "nothing",
      label(), fmt::join(param.sizes(), ", "), at::toString(param.scalar_type()));
}

void ReducerBucket::finish() {
  const at::NoGradGuard no_grad;
  if (!finish_) return group_->finish();
  const at::Tensor result = finish_();
  finish_ = nullptr;
  if (!buffer_) {
    refuse_other_than_sparse(result);
    sparse_ = result;
    return;
  }
  at::Tensor flat = buffer_->grad_data();
  require<UsageError>(result.defined() && result.numel() == flat.numel(),
                      "communication hook: returned {} elements for {}, allowed: {}",
                      result.defined() ? result.numel() : 0, group_->label(), flat.numel());
  if (result.data_ptr() != flat.data_ptr()) flat.copy_(result.reshape(-1));
}

void ReducerBucket::give(size_t place, bool used) {
  const at::NoGradGuard no_grad;
  at::Tensor& grad = params()[place].tensor.mutable_grad();
  const at::Tensor kept = std::move(kept_[place]);
  kept_[place] = at::Tensor();
  if (!used) {
    if (kept.defined()) at::Tensor(expected_grad(place)).copy_(kept);
  } else if (!buffer_) {
    grad = sparse_;
  } else if (as_view()) {
    buffer_->check_grad_attached(buffer_index(place));
  } else if (grad.defined()) {
    grad.copy_(expected_grad(place));
  } else {
    grad = expected_grad(place).to(params()[place].tensor.scalar_type(), false, true);
  }
  if (!buffer_) sparse_ = at::Tensor();
}

void ReducerBucket::give_all() {
  if (buffer_ && as_view()) return buffer_->check_grads_attached();
  for (size_t place = 0; place < params().size(); ++place) give(place, true);
}

void ReducerBucket::zero_grad() {
  const at::NoGradGuard no_grad;
  if (buffer_) at::Tensor(buffer_->grad_data()).zero_();
  for (size_t place = 0; place < params().size(); ++place) {
    at::Tensor& grad = params()[place].tensor.mutable_grad();
    if (!grad.defined() || grad.is_same(expected_grad(place))) continue;
    if (!buffer_)
      grad = at::Tensor();
    else if (as_view())
      buffer_->attach_grad(buffer_index(place));
    else
      grad.zero_();
  }
}

void ReducerBucket::move_in(size_t place) {
  if (buffer_ && as_view()) buffer_->adopt_grad(buffer_index(place));
}

}  // namespace lockstep
