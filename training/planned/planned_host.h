#pragma once

// Internal.

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/parallel_state/rank_program.h"

namespace lockstep {

/// Bytes that tensors of a planned device have on one rank.
struct PlannedMemory {
  int64_t bytes = 0;  ///< now
  int64_t peak = 0;
};

/// The rank that runs on this thread, for what libtorch asks of the planned device. One at a time.
class PlannedHost {
 public:
  PlannedHost();
  virtual ~PlannedHost();
  PlannedHost(const PlannedHost&) = delete;
  PlannedHost& operator=(const PlannedHost&) = delete;

  /// That of this thread, or null.
  static PlannedHost* current();

  /// Where the device's current stream has come to.
  virtual uint32_t stream_position() const = 0;
  /// The host waits until the stream has come there.
  virtual void wait_for_stream(uint32_t position) = 0;
  /// What the host reads where it copies `device` into `host`.
  virtual void read(const at::Tensor& device, at::Tensor& host) const = 0;
  /// The device's current stream gets work to do.
  virtual void on_kernel(const ProgramKernel& /*kernel*/) {}

  const std::shared_ptr<PlannedMemory>& memory() const { return memory_; }

 private:
  std::shared_ptr<PlannedMemory> memory_ = std::make_shared<PlannedMemory>();
};

}  // namespace lockstep
