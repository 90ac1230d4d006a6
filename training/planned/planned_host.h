#pragma once

// Internal.

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/parallel_state/rank_program.h"

namespace lockstep {

class RepeatedTasks;

/// Bytes that tensors of a planned device have on one rank, apart from those made under an
/// OnPlannedHost.
struct PlannedMemory {
  int64_t bytes = 0;  ///< now
  int64_t peak = 0;
};

/// The rank that runs on this thread; it answers what libtorch asks of the planned device. One at a
/// time.
class PlannedHost {
 public:
  PlannedHost();
  virtual ~PlannedHost();
  PlannedHost(const PlannedHost&) = delete;
  PlannedHost& operator=(const PlannedHost&) = delete;

  /// The object of this thread, or null.
  static PlannedHost* current();

  /// The position that the device's current stream has reached.
  virtual uint32_t stream_position() const = 0;
  /// The host waits until the stream has reached that position.
  virtual void wait_for_stream(uint32_t position) = 0;
  /// Provides what the host reads when it copies `device` into `host`.
  virtual void read(const at::Tensor& device, at::Tensor& host) const = 0;
  /// The device's current stream is given work. Not called while an OnPlannedHost lives.
  virtual void on_kernel(const ProgramKernel& /*kernel*/) {}
  /// What runs the tasks of a pipeline; null: they all run.
  virtual RepeatedTasks* repeated_tasks() { return nullptr; }

  const std::shared_ptr<PlannedMemory>& memory() const { return memory_; }

  /// While it lives, all kernels belong to backward, also those outside autograd's engine.
  class InBackward;
  bool is_in_backward() const { return in_backward_; }

 private:
  std::shared_ptr<PlannedMemory> memory_ = std::make_shared<PlannedMemory>();
  bool in_backward_ = false;
};

class PlannedHost::InBackward {
 public:
  explicit InBackward(PlannedHost& host) : host_(host) { host_.in_backward_ = true; }
  ~InBackward() { host_.in_backward_ = false; }
  InBackward(const InBackward&) = delete;
  InBackward& operator=(const InBackward&) = delete;

 private:
  PlannedHost& host_;
};

}  // namespace lockstep
