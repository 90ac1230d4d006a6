#pragma once

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

/// What a tensor that is received looks like.
struct TensorShape {
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
};

/// What a transfer is called. Whoever makes it keeps it as long as there may be a transfer of that
/// name to start: the transfers look at it, so that a step makes no text.
struct TransferLabel {
  explicit TransferLabel(std::string of_tensor)
      : tensor(std::move(of_tensor)), shape("shape of " + tensor) {}
  std::string tensor;
  std::string shape;  ///< of the message that says what the tensor looks like
};

/// A tensor under way to this rank. Movable, default: nothing.
class IncomingTensor {
 public:
  IncomingTensor() = default;

  /// Starts to receive a tensor of `shape` on `device` from the rank at position `source`.
  IncomingTensor(const ProcessGroup& group, c10::Device device, const TensorShape& shape,
                 int64_t source, const TransferLabel& label);

  /// The same for a tensor sent by send_with_shape(): receives the shape first. `label` stays until
  /// receive_data().
  IncomingTensor(const ProcessGroup& group, c10::Device device, int64_t source,
                 const TransferLabel& label);

  /// A tensor that is here already.
  explicit IncomingTensor(at::Tensor tensor) : data_(std::move(tensor)) {}

  /// Where the shape comes first: waits for it and starts to receive the tensor. Between the two
  /// nothing else may be sent to or received from that rank.
  void receive_data();

  /// Waits for the tensor and hands it over.
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

/// Sends that block nobody: a tensor is let go as soon as the other side has it, on the CPU by a
/// thread that waits in place of the caller. It is one thread for the life of the queue, which
/// should be that of the job: c10d keeps a few bytes for each thread that has ever waited.
class SendQueue {
 public:
  SendQueue();
  /// drop().
  ~SendQueue();
  SendQueue(const SendQueue&) = delete;
  SendQueue& operator=(const SendQueue&) = delete;

  /// Sends `tensor`, contiguous, to the rank at position `destination`. Throws what an earlier send
  /// failed with. `sent`, if any, is called once the other side has it, maybe by another thread.
  void send(const ProcessGroup& group, const at::Tensor& tensor, int64_t destination,
            const TransferLabel& label, std::function<void()> sent = {});

  /// Precedes the tensor by its sizes and dtype, in a message of 64 bytes of host memory. At most 6
  /// dimensions; UsageError.
  void send_with_shape(const ProcessGroup& group, const at::Tensor& tensor, int64_t destination,
                       const TransferLabel& label, std::function<void()> sent = {});

  /// Returns when everything has been sent; throws what a send failed with.
  void finish();
  /// Forgets what has not been sent, and errors. Returns when the thread is done with the send for
  /// which it waits.
  void drop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
