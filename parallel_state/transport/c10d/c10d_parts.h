#pragma once

// Internal: c10d's Work objects as parts of an operation.

#include <mutex>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/parallel_state/pending.h"

namespace lockstep {

/// A part that c10d carries out.
class C10dPart : public Pending {
 public:
  explicit C10dPart(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
  bool is_completed() const override { return work_->isCompleted(); }

 protected:
  c10d::Work& work() const { return *work_; }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
};

/// Implemented by works that are not NCCL's and keep their outputs as NCCL's do.
class KeepsOutputs {
 public:
  virtual ~KeepsOutputs() = default;
  /// A work for the same operation, with its end and its errors but none of its outputs.
  virtual c10::intrusive_ptr<c10d::Work> without_outputs() const = 0;
};

/// A part on tensors on a device with streams: the current stream waits. NCCL's works keep their
/// outputs as long as they live, and their inputs until a stream waits. DeviceWatch keeps this part
/// until the operation has ended on the device, so the outputs are dropped once the current stream
/// waits, on the thread that waits. From then on the allocator orders the memory's next use on that
/// stream.
class StreamPart : public Pending {
 public:
  explicit StreamPart(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}
  /// Lets go of the inputs of a work for which nobody has waited. NCCL's watchdog would keep those
  /// of a work that has ended until the backend's next launch.
  ~StreamPart() override;
  void wait(const Waiting& /*waiting*/) override { wait_on_stream(); }
  void wait_on_stream();
  bool is_completed() const override;
  std::optional<std::string> failure() const override;

 private:
  mutable std::mutex mutex_;  ///< DeviceWatch asks while another thread waits
  c10::intrusive_ptr<c10d::Work> work_;
  bool waited_ = false;
};

/// A collective of CPU tensors.
class CollectivePart : public C10dPart {
 public:
  using C10dPart::C10dPart;
  void wait(const Waiting& waiting) override;
};

/// A Gloo message. A timeout would leave its connection unusable, so another thread looks for
/// failures. Gloo says whether it has ended only after wait().
class MessagePart : public C10dPart {
 public:
  using C10dPart::C10dPart;
  void wait(const Waiting& waiting) override;
};

}  // namespace lockstep
