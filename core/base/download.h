#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

namespace lockstep {

/// A device's tensor on its way to the host, without a wait: the device's current stream copies it
/// into page-locked memory. On the CPU it is the tensor itself.
class Download {
 public:
  explicit Download(const at::Tensor& tensor);

  /// Waits until it has arrived. Returns the tensor on the CPU.
  const at::Tensor& wait();

 private:
  at::Tensor host_;
  std::optional<c10::Event> copied_;
};

}  // namespace lockstep
