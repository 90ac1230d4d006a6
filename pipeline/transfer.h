#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "lockstep/parallel_state/process_group.h"
#include "lockstep/parallel_state/work.h"

/// Point-to-point transfer between pipeline stages.
namespace lockstep {

/// Shape and dtype of a tensor to be received.
struct TensorShape {
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
};

/// The label of a transfer. Keep it alive as long as a transfer with this label may start:
/// transfers refer to it, so that a step builds no strings.
struct TransferLabel {
  explicit TransferLabel(std::string of_tensor)
      : tensor(std::move(of_tensor)), shape("shape of " + tensor) {}
  std::string tensor;
  std::string shape;  ///< label of the message with the tensor's shape
};

/// A tensor that this rank is receiving. Movable; empty if default-constructed.
class IncomingTensor {
 public:
  IncomingTensor() = default;

  /// Starts to receive a tensor of `shape` on `device` from the rank at position `source`.
  IncomingTensor(const ProcessGroup& group, c10::Device device, const TensorShape& shape,
                 int64_t source, const TransferLabel& label);

  /// The same for a tensor sent by send_with_shape(): receives the shape first. `label` must stay
  /// alive until receive_data().
  IncomingTensor(const ProcessGroup& group, c10::Device device, int64_t source,
                 const TransferLabel& label);

  /// A tensor that is already on this rank.
  explicit IncomingTensor(at::Tensor tensor) : data_(std::move(tensor)) {}

  /// If the shape comes first: waits for it and starts to receive the tensor. Between shape and
  /// tensor nothing else may be sent to or received from that rank.
  void receive_data();

  /// Waits for the tensor and returns it.
  at::Tensor take();

 private:
  std::optional<ProcessGroup> group_;
  c10::Device device_ = c10::kCPU;
  int64_t source_ = -1;
  const TransferLabel* label_ = nullptr;
  at::Tensor header_;  ///< defined until the data are being received
  at::Tensor data_;
  Work work_;
};

/// Non-blocking sends: a tensor is released as soon as the other side has it, on the CPU by a
/// thread that waits in place of the caller. The queue has one thread as long as it lives, and
/// should live as long as the job: c10d keeps a few bytes for each thread that has ever waited.
class SendQueue {
 public:
  SendQueue();
  /// drop().
  ~SendQueue();
  SendQueue(const SendQueue&) = delete;
  SendQueue& operator=(const SendQueue&) = delete;

  /// Sends `tensor`, contiguous, to the rank at position `destination`. Throws the error of an
  /// earlier send that failed. `sent`, if any, is called once the other side has the tensor,
  /// possibly by another thread.
  void send(const ProcessGroup& group, const at::Tensor& tensor, int64_t destination,
            const TransferLabel& label, std::function<void()> sent = {});

  /// Sends the tensor's sizes and dtype first, in a message of 64 bytes of host memory. UsageError
  /// for more than 6 dimensions.
  void send_with_shape(const ProcessGroup& group, const at::Tensor& tensor, int64_t destination,
                       const TransferLabel& label, std::function<void()> sent = {});

  /// Returns when at most `most` tensors are still to be sent; device tensors: then the current
  /// stream waits for those before them. Throws the error of a send that failed.
  void wait_until_left(size_t most);
  /// Returns when everything has been sent; throws the error of a send that failed.
  void finish();
  /// Discards unsent tensors and errors. Returns when the thread has finished the send that it
  /// waits for.
  void drop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
