#pragma once

// Internal: device work that is recorded once and launched many times.

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/device_graph.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/parallel_state/recorded_calls.h"

namespace lockstep {

/// The work that a function launched on this rank's device, including its communication. What the
/// host did in that function is not repeated, and what it passed to the device (addresses, numbers
/// by value) stays the same.
class RecordedWork {
 public:
  explicit RecordedWork(const ParallelState& parallel_state);
  /// Waits for the device, which may still be running it.
  ~RecordedWork();
  RecordedWork(const RecordedWork&) = delete;
  RecordedWork& operator=(const RecordedWork&) = delete;

  /// Records what `body` launches on the current stream, which must not be the device's default
  /// stream; it replaces what was recorded before. Waits for the device first. The work is not
  /// executed. Every collective must have run once before, so that its communicator exists.
  void record(const std::function<void()>& body);
  bool is_recorded() const { return graph_ != nullptr; }

  /// Launches it on the current stream. All ranks that communicate in it must do so. Errors as for
  /// the collectives.
  void launch() const;

 private:
  ParallelState parallel_state_;
  std::unique_ptr<kernels::DeviceGraph> graph_;
  RecordedCalls calls_;
};

/// A micro-batch at a fixed address, for recorded work that reads it.
class StaticInput {
 public:
  /// Has the shapes of `like`, which has tokens and labels, possibly positions in documents, and no
  /// documents that bound attention.
  StaticInput(const GPTInput& like, const ParallelState& parallel_state);

  /// Copies a micro-batch into it, on the current stream.
  void assign(const GPTInput& from);
  const GPTInput& input() const { return input_; }

 private:
  GPTInput input_;
};

}  // namespace lockstep
