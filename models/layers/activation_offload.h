#pragma once

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

namespace lockstep {

/// Keeps what backward needs in page-locked memory of the host: tensors, and everything that
/// autograd keeps of a layer (see run_offloaded). Two streams of the device copy it there and back
/// while the device computes, and the host waits for neither. They are from the high-priority pool,
/// so that no communicator has them, unless its group's options ask for such streams.
///
/// On a planned rank the host's memory is that of OnPlannedHost.
///
/// A kept item leaves the device when the next one is kept: the computation then waits for its
/// copy. Backward needs the items in the opposite order: taking one starts the fetch of the one
/// before it. So the device has at most two of them, however far ahead the host is.
class ActivationOffload {
 public:
  explicit ActivationOffload(c10::Device device);

  class Link;
  class Kept;

  /// What is kept from now on belongs to another forward pass.
  void begin_pass();

  /// Whether the tensor is on the device; others cannot be kept.
  bool takes(const at::Tensor& tensor) const;

  /// Takes a copy of `tensor` as the current stream will have computed it.
  std::shared_ptr<Kept> keep(const at::Tensor& tensor);

  /// Makes the last link leave. Returns it, as the predecessor of the link that is appended next.
  std::shared_ptr<Link> leave_last();
  void append(std::shared_ptr<Link> link) { last_ = std::move(link); }
  const c10::Stream& to_host() const { return to_host_; }
  const c10::Stream& to_device() const { return to_device_; }

 private:
  c10::Stream to_host_, to_device_;
  std::shared_ptr<Link> last_;
};

/// What leaves the device, and is fetched, as one. It may outlive the ActivationOffload.
class ActivationOffload::Link {
 public:
  explicit Link(std::shared_ptr<Link> before) : before_(std::move(before)) {}
  virtual ~Link() = default;
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  /// The device frees its memory once the copy is made. Does nothing if it is needed again.
  virtual void leave() = 0;

 protected:
  /// Starts to fetch it, unless it is there.
  virtual void fetch() = 0;
  /// Fetches it, and the one before, unless that was taken already.
  void fetch_for_use();

  static c10::Stream current_stream(c10::Device device);
  /// Page-locked memory of the host for a copy of `tensor`.
  static at::Tensor host_memory(const at::Tensor& tensor);
  /// Copies in the order of `stream`, without a wait.
  static void copy(const at::Tensor& to, const at::Tensor& from, const c10::Stream& stream);
  /// Makes `later` wait until `earlier` has reached its present position.
  static void follow(const c10::Stream& later, const c10::Stream& earlier);

 private:
  std::shared_ptr<Link> before_;
  bool taken_ = false;
};

/// One tensor.
class ActivationOffload::Kept final : public Link {
 public:
  Kept(const at::Tensor& tensor, ActivationOffload& offload);
  ~Kept() override;

  /// UsageError: the tensor was changed in place since it was kept, perhaps before it was copied.
  void leave() override;

  /// A tensor on the device with those values, for the current stream. Fetches the one before,
  /// unless that was taken already. UsageError as in leave().
  at::Tensor take();

 private:
  void fetch() override;
  void check_unchanged() const;

  c10::Stream to_device_;
  c10::Stream stream_;  ///< that owns the memory of on_device_
  at::Tensor host_;
  c10::Event copied_;
  at::Tensor on_device_;  ///< until it has left; again from fetch() to take()
  uint32_t version_;
  std::optional<c10::Event> fetched_;  ///< when on_device_ has the values again
};

}  // namespace lockstep
