#include "lockstep/models/activation_offload.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "lockstep/core/check.h"
#include "lockstep/core/planned_cpu.h"

namespace lockstep {
namespace {

c10::Stream stream_of_pool(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

}  // namespace

c10::Stream ActivationOffload::Link::current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

at::Tensor ActivationOffload::Link::host_memory(const at::Tensor& tensor) {
  const OnPlannedHost planned;
  if (tensor.is_meta()) return at::empty(tensor.sizes(), tensor.options());
  return at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true));
}

void ActivationOffload::Link::copy(const at::Tensor& to, const at::Tensor& from,
                                   const c10::Stream& stream) {
  const OnPlannedHost planned;
  const c10::StreamGuard on(stream);
  to.copy_(from, /*non_blocking=*/true);
}

void ActivationOffload::Link::follow(const c10::Stream& later, const c10::Stream& earlier) {
  c10::Event reached(earlier.device_type());
  reached.record(earlier);
  reached.block(later);
}

ActivationOffload::ActivationOffload(c10::Device device)
    : to_host_(stream_of_pool(device)), to_device_(stream_of_pool(device)) {}

/// A planned device's tensors have no index.
bool ActivationOffload::takes(const at::Tensor& tensor) const {
  const c10::Device device = to_host_.device();
  return tensor.is_meta() ? device.is_meta() : tensor.device() == device;
}

void ActivationOffload::begin_pass() {
  if (const auto last = std::exchange(last_, nullptr)) last->leave();
}

std::shared_ptr<ActivationOffload::Link> ActivationOffload::leave_last() {
  if (last_) last_->leave();
  return last_;
}

std::shared_ptr<ActivationOffload::Kept> ActivationOffload::keep(const at::Tensor& tensor) {
  auto kept = std::make_shared<Kept>(tensor.detach(), *this);
  append(kept);
  return kept;
}

void ActivationOffload::Link::fetch_for_use() {
  fetch();
  if (before_ && !before_->taken_) before_->fetch();
  before_ = nullptr;
  taken_ = true;
}

ActivationOffload::Kept::Kept(const at::Tensor& tensor, ActivationOffload& offload)
    : Link(offload.leave_last()),
      to_device_(offload.to_device()),
      stream_(current_stream(tensor.device())),
      host_(host_memory(tensor)),
      copied_(tensor.device().type()),
      on_device_(tensor),
      version_(static_cast<uint32_t>(tensor._version())) {
  follow(offload.to_host(), stream_);
  copy(host_, tensor, offload.to_host());
  copied_.record(offload.to_host());
}

/// Waits for a copy that may be under way: after this the memory is reused.
ActivationOffload::Kept::~Kept() {
  if (!on_device_.defined()) return;
  try {
    (fetched_ ? *fetched_ : copied_).block(stream_);
  } catch (const std::exception&) {
    // The device has failed and reports it to its next user.
  }
}

void ActivationOffload::Kept::check_unchanged() const {
  require<UsageError>(fetched_ || static_cast<uint32_t>(on_device_._version()) == version_,
                      "recompute: found an input of shape [{}] that was changed in place after the "
                      "call; allowed: inputs that stay as they were until backward",
                      fmt::join(on_device_.sizes(), ", "));
}

void ActivationOffload::Kept::leave() {
  if (!on_device_.defined() || fetched_) return;
  copied_.block(stream_);
  check_unchanged();
  on_device_.reset();
}

void ActivationOffload::Kept::fetch() {
  if (on_device_.defined()) return;
  const c10::Device device = to_device_.device();
  stream_ = current_stream(device);
  on_device_ = at::empty(host_.sizes(), host_.options().device(device).pinned_memory(false));
  follow(to_device_, stream_);  // which may have used this memory before
  copied_.block(to_device_);
  copy(on_device_, host_, to_device_);
  fetched_.emplace(device.type());
  fetched_->record(to_device_);
}

at::Tensor ActivationOffload::Kept::take() {
  fetch_for_use();
  (fetched_ ? *fetched_ : copied_).block(current_stream(on_device_.device()));
  check_unchanged();
  fetched_.reset();
  return std::exchange(on_device_, at::Tensor());
}

}  // namespace lockstep
