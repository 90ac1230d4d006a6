#include "lockstep/core/download.h"

#include <ATen/ATen.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace lockstep {

Download::Download(const at::Tensor& tensor) : host_(tensor) {
  if (tensor.is_cpu()) return;
  if (tensor.is_meta())  // a planned device copies nothing
    host_ = at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
  else
    host_ = at::empty(tensor.sizes(), tensor.options().device(at::kCPU).pinned_memory(true));
  host_.copy_(tensor, /*non_blocking=*/true);
  const c10::impl::VirtualGuardImpl device(tensor.device().type());
  copied_.emplace(tensor.device().type());
  copied_->record(device.getStream(tensor.device()));
}

const at::Tensor& Download::wait() {
  if (copied_) copied_->synchronize();
  copied_.reset();
  return host_;
}

}  // namespace lockstep
