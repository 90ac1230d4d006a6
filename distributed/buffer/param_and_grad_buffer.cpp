#include "lockstep/distributed/param_and_grad_buffer.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/core/check.h"
#include "lockstep/core/flat_tensor.h"
#include "lockstep/distributed/buffer_kind.h"
#include "lockstep/distributed/closed_storage.h"
#include "lockstep/distributed/lent_storage.h"

namespace lockstep {
namespace {

constexpr const char* kFreed =
    "a gradient is read after it was reduced: gradients are sharded over the data-parallel ranks "
    "(ddp.data_parallel_sharding_strategy), and its memory is freed; read the shard that the rank "
    "owns, ParamAndGradBuffer::held_grads()";
constexpr const char* kOffloaded =
    "a gradient is read although the gradient buffers are off-loaded to the host; call "
    "restore_grad_buffers() of its DistributedDataParallel first";

void check_parameter(const NamedParameter& param, const NamedParameter& first,
                     BufferContents contents) {
  const at::Tensor& tensor = param.tensor;
  require<UsageError>(tensor.defined() && tensor.layout() == at::kStrided && tensor.is_leaf() &&
                          tensor.requires_grad(),
                      "parameter '{}': must be a dense leaf tensor that requires a gradient",
                      param.name);
  require<UsageError>(
      (contents == BufferContents::grads || tensor.scalar_type() == first.tensor.scalar_type()) &&
          tensor.device() == first.tensor.device(),
      "parameter '{}' is {} on {}, but the buffer holds {} on {}", param.name,
      at::toString(tensor.scalar_type()), tensor.device().str(),
      at::toString(first.tensor.scalar_type()), first.tensor.device().str());
}

/// The elements that are in no slot.
std::vector<ElementRange> gaps_of(const ParamLayout& layout) {
  std::vector<ElementRange> slots;
  for (const ParamLayout::Slot& slot : layout.slots) slots.push_back({slot.start, slot.end});
  std::sort(slots.begin(), slots.end(),
            [](const ElementRange& a, const ElementRange& b) { return a.start < b.start; });
  slots.push_back({layout.numel, layout.numel});
  std::vector<ElementRange> gaps;
  int64_t end = 0;
  for (const ElementRange& slot : slots) {
    if (end < slot.start) gaps.push_back({end, slot.start});
    end = std::max(end, slot.end);
  }
  return gaps;
}

std::string names_of(const std::vector<NamedParameter>& params) {
  return params.size() == 1
             ? fmt::format("parameter '{}'", params.front().name)
             : fmt::format("a parameter of '{}' to '{}'", params.front().name, params.back().name);
}

at::Tensor slot_view(const at::Tensor& flat, const ParamLayout::Slot& slot,
                     const at::Tensor& shaped) {
  return flat.narrow(0, slot.start, slot.end - slot.start).view(shaped.sizes());
}

}  // namespace

ParamAndGradBuffer::ParamAndGradBuffer(std::vector<NamedParameter> params,
                                       at::ScalarType grad_dtype, const LayoutOptions& options,
                                       int64_t shard, BufferContents contents,
                                       const Lending& lending)
    : params_(std::move(params)),
      sharded_(options.distributed_optimizer),
      whole_matrices_(options.whole_parameters) {
  require<UsageError>(!params_.empty(), "a gradient buffer needs at least one parameter");
  std::vector<LayoutParam> sizes;
  for (const NamedParameter& param : params_) {
    check_parameter(param, params_.front(), contents);
    sizes.push_back(
        layout_param(param.description, param.tensor.sizes().vec(), param.tensor.numel()));
  }
  layout_ = compute_param_layout(sizes, options);
  all_ = {{0, layout_.numel}};
  if (!sharded_) owned_ = all_;
  for (const ParamLayout::Bucket& bucket : layout_.buckets)
    if (sharded_) owned_.push_back(shard_of_bucket(bucket, options.data_parallel_size, shard));

  const at::NoGradGuard no_grad;
  const auto tensor_options = params_.front().tensor.options().requires_grad(false);
  if (contents == BufferContents::params_and_grads)
    param_data_ = flat_zeros(layout_.numel, tensor_options);
  const bool lends = lending.memory != LentMemory::none && lending.pool && sharded_ &&
                     options.data_parallel_size > 1 && layout_.numel > 0;
  grad_data_ = lends ? at::empty({layout_.numel}, tensor_options.dtype(grad_dtype))
                     : flat_zeros(layout_.numel, tensor_options.dtype(grad_dtype));
  for (size_t i = 0; i < params_.size(); ++i) {
    at::Tensor& tensor = params_[i].tensor;
    if (param_data_.defined()) {
      const at::Tensor view = slot_view(param_data_, layout_.slots[i], tensor);
      view.copy_(tensor);
      tensor.set_data(view);
    }
    views_.push_back({tensor, slot_view(grad_data_, layout_.slots[i], tensor).detach()});
    if (contents != BufferContents::unattached_grads && !lends) attach_grad(views_.back());
  }
  if (lends) lend(lending, options.data_parallel_size);
}

void ParamAndGradBuffer::lend(const Lending& lending, int64_t shards) {
  require<UsageError>(layout_.buckets.size() == 1,
                      "a buffer that lends its memory: found {} buckets, allowed: one",
                      layout_.buckets.size());
  gaps_ = gaps_of(layout_);
  pool_ = lending.pool;
  const int64_t numel = layout_.numel / shards;
  grad_shard_ = flat_zeros(numel, grad_data_.options());
  std::vector<at::Tensor> grads;
  for (const Views& views : views_) grads.push_back(views.grad);
  lent_grads_ = std::make_unique<LentStorage>(grad_data_, std::move(grads), kFreed, lending.pool);
  close_grads();
  if (lending.memory != LentMemory::params_and_grads) return;
  param_shard_ = flat_zeros(numel, param_data_.options());
  std::vector<at::Tensor> leaves;
  for (const NamedParameter& param : params_)
    if (param.tensor.numel() > 0)
      leaves.push_back(param.tensor);
    else  // is never closed, so as a view it would keep the memory of all
      param.tensor.set_data(at::empty(param.tensor.sizes(), param_data_.options()));
  lent_params_ = std::make_unique<LentStorage>(
      param_data_, std::move(leaves),
      fmt::format("{} is read where it is not gathered: it is sharded over the data-parallel ranks "
                  "(ddp.data_parallel_sharding_strategy = optim_grads_params), and only operators "
                  "on the thread of forward and backward gather it; call unshard() of its "
                  "DistributedDataParallel first, on every rank",
                  names_of(params_)),
      lending.pool);
}

at::Tensor ParamAndGradBuffer::owned_params(ElementRange range) const {
  if (!param_shard_.defined()) return param_data_.slice(0, range.start, range.end);
  const int64_t start = owned_.front().start;
  return param_shard_.slice(0, range.start - start, range.end - start);
}

at::Tensor ParamAndGradBuffer::held_grads(ElementRange range) const {
  if (!grad_shard_.defined()) return grad_data_.slice(0, range.start, range.end);
  const int64_t start = owned_.front().start;
  return grad_shard_.slice(0, range.start - start, range.end - start);
}

int64_t ParamAndGradBuffer::kept_param_bytes() const {
  return static_cast<int64_t>((lent_params_ ? param_shard_ : param_data_).nbytes());
}

int64_t ParamAndGradBuffer::kept_grad_bytes() const {
  return static_cast<int64_t>((lent_grads_ ? grad_shard_ : grad_data_).nbytes());
}

void ParamAndGradBuffer::open_grads() {
  if (lent_grads_->is_open()) return;
  const at::NoGradGuard no_grad;
  lent_grads_->open();
  has_grad_.assign(params_.size(), false);
  for (const ElementRange& gap : gaps_) grad_data_.slice(0, gap.start, gap.end).zero_();
}

void ParamAndGradBuffer::complete_grads() {
  open_grads();
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < views_.size(); ++i)
    if (!has_grad_[i]) views_[i].grad.zero_();
  has_grad_.assign(params_.size(), true);
}

void ParamAndGradBuffer::close_grads() {
  for (Views& views : views_) views.param.mutable_grad().reset();
  lent_grads_->close(LentStorage::OtherViews::keep);
}

void ParamAndGradBuffer::keep_param_shard() {
  const at::NoGradGuard no_grad;
  const ElementRange& own = owned_.front();
  param_shard_.copy_(param_data_.slice(0, own.start, own.end));
}

bool ParamAndGradBuffer::holds_param(size_t index) const {
  const auto* const tensor = params_[index].tensor.unsafeGetTensorImpl();
  if (lent_params_ && tensor->numel() == 0) return true;
  const auto* const storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  return tensor->storage_offset() == layout_.slots[index].start &&
         (storage == param_data_.storage().unsafeGetStorageImpl() ||
          (lent_params_ && storage == lent_params_->closed()));
}

ParamAndGradBuffer::~ParamAndGradBuffer() = default;

int64_t ParamAndGradBuffer::owned_numel() const {
  int64_t numel = 0;
  for (const ElementRange& range : owned_) numel += range.numel();
  return numel;
}

void ParamAndGradBuffer::offload_grads() {
  if (grads_offloaded()) return;
  const at::NoGradGuard no_grad;
  const auto options = grad_data_.options().device(at::kCPU).pinned_memory(!grad_data_.is_cpu());
  at::Tensor host = at::empty({layout_.numel}, options);
  host.copy_(grad_data_);
  grad_storage_ = grad_data_.storage();
  grad_storage_.unsafeGetStorageImpl()->set_data_ptr_noswap(
      c10::DataPtr(nullptr, grad_data_.device()));
  set_grad_storage(closed_twin(grad_storage_, kOffloaded));
  host_grads_ = std::move(host);
}

void ParamAndGradBuffer::restore_grads() {
  if (!grads_offloaded()) return;
  const at::NoGradGuard no_grad;
  const c10::DeviceGuard guard(grad_data_.device());  // the allocator takes the current device
  auto* const storage = grad_storage_.unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(storage->allocator()->allocate(storage->nbytes()));
  set_grad_storage(grad_storage_);
  grad_data_.copy_(host_grads_);
  host_grads_.reset();
}

void ParamAndGradBuffer::set_grad_storage(const c10::Storage& storage) {
  set_storage_of(grad_data_, storage);
  for (const Views& views : views_) set_storage_of(views.grad, storage);
}

void ParamAndGradBuffer::zero_grad() {
  if (lent_grads_) return close_grads();
  grad_data_.zero_();
  for (Views& views : views_)
    if (!views.param.mutable_grad().is_same(views.grad)) attach_grad(views);
}

void ParamAndGradBuffer::adopt_grad(size_t index) {
  Views& views = views_[index];
  const at::Tensor& grad = views.param.mutable_grad();
  if (!grad.defined() || grad.is_same(views.grad)) return;
  copy_grad_in(index);
  attach_grad(views);
}

void ParamAndGradBuffer::copy_grad_in(size_t index) {
  Views& views = views_[index];
  const at::Tensor& grad = views.param.mutable_grad();
  const std::string& name = params_[index].name;
  require<UsageError>(grad.defined(), "gradient sync: '{}' has no gradient after its backward",
                      name);
  require<UsageError>(grad.layout() == at::kStrided,
                      "gradient sync: the gradient of '{}' is sparse; allowed: dense gradients (an "
                      "embedding with sparse = false)",
                      name);
  require<UsageError>(grad.sizes() == views.grad.sizes(),
                      "gradient sync: the gradient of '{}' has shape {}, allowed: {}", name,
                      fmt::join(grad.sizes(), "x"), fmt::join(views.grad.sizes(), "x"));
  const at::NoGradGuard no_grad;
  if (lent_grads_) {
    open_grads();
    has_grad_[index] = true;
  }
  views.grad.copy_(grad);
}

void ParamAndGradBuffer::check_grads_attached(const char* zero_call) {
  for (size_t i = 0; i < views_.size(); ++i) check_grad_attached(i, zero_call);
}

void ParamAndGradBuffer::check_grad_attached(size_t index, const char* zero_call) {
  Views& views = views_[index];
  const at::Tensor& grad = views.param.mutable_grad();
  if (grad.is_same(views.grad) || (lent_grads_ && !grad.defined())) [[likely]]
    return;
  if (!grad.defined()) return attach_grad(views);
  const bool freed = lent_grads_ && !lent_grads_->is_open();
  require<UsageError>(!freed && grad.has_storage() && grad.data_ptr() == views.grad.data_ptr(),
                      "gradient sync: the gradient of '{}' no longer lies in its buffer; it was "
                      "replaced after backward. Change gradients in place, and zero them with "
                      "{}()",
                      params_[index].name, zero_call);
}

}  // namespace lockstep
