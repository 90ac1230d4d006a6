#pragma once

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace lockstep {

/// Keeps tensors that backward needs in the host's memory, page-locked. Two streams of the device
/// copy them there and back beside its computation, and the host waits for none of them. They are
/// of the pool of high priority, so that no communicator has them, unless its group's options ask
/// for such streams.
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

  /// Whether the tensor lies on the device; others cannot be kept.
  bool takes(const at::Tensor& tensor) const { return tensor.device() == to_host_.device(); }

  /// Takes a copy of `tensor` as the current stream will have computed it.
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
  ~Kept();
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;

  /// The device gives its memory up, once the copy is made. UsageError: the tensor was changed in
  /// place since it was kept, maybe before it was copied.
  void leave();

  /// A tensor of the device with those values, for the current stream. Has the one before fetched,
  /// unless that was taken already. UsageError as of leave().
  at::Tensor take();

 private:
  void fetch();
  void check_unchanged() const;

  c10::Stream to_device_;
  c10::Stream stream_;  ///< whose memory on_device_ is
  std::shared_ptr<Kept> before_;
  at::Tensor host_;
  c10::Event copied_;
  at::Tensor on_device_;  ///< until it has left; again from fetch() to take()
  uint32_t version_;
  bool taken_ = false;
  std::optional<c10::Event> fetched_;  ///< when on_device_ has the values again
};

}  // namespace lockstep
