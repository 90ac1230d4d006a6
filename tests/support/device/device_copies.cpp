#include <ATen/core/LegacyTypeDispatch.h>

#include "lockstep/tests/support/device/device_memory.h"
#include "lockstep/tests/support/device/device_streams.h"
#include "lockstep/tests/support/device/operator_call.h"
#include "lockstep/tests/support/device/operator_kernels.h"

namespace lockstep::testing {
namespace {

constexpr const char* kCopy = "aten::copy_";

/// `from` and `to` are CPU tensors.
void enqueue_copy(const c10::Stream& stream, const at::Tensor& from, const at::Tensor& to) {
  enqueue(stream, kCopy, [from, to] { to.copy_(from); });
}

// As in CUDA: runs on the source's stream, and the streams of the two devices wait for each other.
void copy_between(const at::Tensor& from, const at::Tensor& to) {
  const c10::Stream source = current_stream(from.device().index());
  const c10::Stream target = current_stream(to.device().index());
  if (source == target) return enqueue_copy(source, host_view(from), host_view(to));
  DeviceEvent::record(target).block(source);
  enqueue_copy(source, host_view(from), host_view(to));
  DeviceEvent::record(source).block(target);
}

/// Whether one memcpy is enough. Only then can a copy from or to pinned memory be asynchronous.
bool is_one_transfer(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.strides() == b.strides() &&
         a.is_non_overlapping_and_dense();
}

bool may_overlap_the_host(const at::Tensor& on_host, const at::Tensor& on_device,
                          bool non_blocking) {
  return non_blocking && is_one_transfer(on_host, on_device) &&
         is_pinned_pointer(on_host.const_data_ptr());
}

/// The kernel's operand, which does not own its memory.
at::Tensor without_owner(const at::Tensor& on_host) { return host_view(on_host); }

void copy_from_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const c10::Stream stream = current_stream(to.device().index());
  if (may_overlap_the_host(from, to, non_blocking)) {
    record_use(from.const_data_ptr(), stream);
    return enqueue_copy(stream, without_owner(from), host_view(to));
  }
  enqueue_copy(stream, from, host_view(to));
  wait_for_stream(stream, is_pinned_pointer(from.const_data_ptr()) ? "copy from pinned memory"
                                                                   : "copy from pageable memory");
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const c10::Stream stream = current_stream(from.device().index());
  if (may_overlap_the_host(to, from, non_blocking)) {
    record_use(to.const_data_ptr(), stream);
    return enqueue_copy(stream, host_view(from), without_owner(to));
  }
  enqueue_copy(stream, host_view(from), to);
  wait_for_stream(stream, "copy to host");
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& to, bool non_blocking) {
  const at::Tensor from = source.sizes() == to.sizes() ? source : source.expand(to.sizes());
  if (to.numel() == 0) return to;
  const at::AutoDispatchBelowADInplaceOrView below;
  if (is_lagging(from) && is_lagging(to))
    copy_between(from, to);
  else if (is_lagging(to))
    copy_from_host(from, to, non_blocking);
  else
    copy_to_host(from, to, non_blocking);
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, /*non_blocking=*/false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  const at::Tensor view = host_view(self);
  wait_for_stream(current_stream(self.device().index()), "aten::_local_scalar_dense");
  return view.item();
}

void record_stream(at::Tensor& self, at::Stream stream) {
  record_use(self.storage().data(), stream);
}

}  // namespace

void add_copy_kernels(torch::Library& library) {
  library.impl("_copy_from", TORCH_FN(copy_from));
  library.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  library.impl("_local_scalar_dense", TORCH_FN(local_scalar));
  library.impl("record_stream", TORCH_FN(record_stream));
}

}  // namespace lockstep::testing
