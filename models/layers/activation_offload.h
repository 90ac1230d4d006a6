#pragma once

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace lockstep {

/// Keeps tensors that backward needs in the host's memory, page-locked. Two streams of the device
/// copy them there and back beside its computation, and the host waits for none of them.
///
/// A tensor leaves the device when the next one is kept: the computation then waits for its copy.
/// Backward needs them in the opposite order: whoever takes one has the one before it fetched. So
/// the device has two of them at most, however far ahead the host is.
class ActivationOffload {
 public:
  explicit ActivationOffload(c10::Device device);

  class Kept;

  /// The tensors that are kept from now on belong to another forward pass.
  void begin_pass();

  /// Takes a copy of `tensor` as the current stream will have computed it. Nobody may change it
  /// later.
  std::shared_ptr<Kept> keep(const at::Tensor& tensor);

 private:
  c10::Stream to_host_, to_device_;
  std::shared_ptr<Kept> last_;
};

/// One of the tensors. Lives on without the ActivationOffload that has made it.
class ActivationOffload::Kept {
 public:
  Kept(const at::Tensor& tensor, c10::Stream to_host, c10::Stream to_device,
       std::shared_ptr<Kept> before);

  /// The device gives its memory up, once the copy is made.
  void leave();

  /// A tensor of the device with those values, for the current stream. Has the one before fetched.
  at::Tensor take();

 private:
  void fetch();

  c10::Stream to_device_;
  std::shared_ptr<Kept> before_;
  at::Tensor host_;
  c10::Event copied_;
  at::Tensor on_device_;               ///< until it has left; again from fetch() to take()
  std::optional<c10::Event> fetched_;  ///< when on_device_ has the values again
};

}  // namespace lockstep
