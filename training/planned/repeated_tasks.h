#pragma once

// Internal.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include <ATen/core/Tensor.h>

#include "lockstep/parallel_state/rank_recorder.h"

namespace lockstep {

struct PlannedMemory;

/// The tasks of a pipeline on a planned rank. What a model chunk does in the forward of a
/// micro-batch, and in its backward, is the same for all micro-batches except the first, which may
/// connect ranks and gather parameters, and the last, which may reduce gradients. So the second and
/// the third run. If they do the same, what they did is recorded again for those that follow, and
/// only the last one runs.
class RepeatedTasks {
 public:
  using Compute = std::function<at::Tensor()>;

  /// Both are those of the rank that runs on this thread.
  RepeatedTasks(RankRecorder& recorder, PlannedMemory& memory);
  ~RepeatedTasks();
  RepeatedTasks(const RepeatedTasks&) = delete;
  RepeatedTasks& operator=(const RepeatedTasks&) = delete;

  /// Begins a run of the pipeline; `forward_only`: nothing waits for a backward.
  void begin(int64_t num_microbatches, bool forward_only);
  /// The output of `chunk` for `microbatch`, which `compute` returns. A repeated one has no graph.
  at::Tensor forward(int64_t chunk, int64_t microbatch, const Compute& compute);
  /// The gradient of the chunk's input. `note_backward` is called if it was not computed.
  at::Tensor backward(int64_t chunk, int64_t microbatch, const Compute& compute,
                      const std::function<void()>& note_backward);

  /// Whether a forward was repeated whose backward cannot be: the recording is worth nothing.
  bool failed() const { return failed_; }
  int64_t repeated() const { return repeated_; }

 private:
  struct Form;
  struct Task;
  struct Known;
  struct Kept;

  /// Runs a task and learns what it does.
  at::Tensor run(Known& known, int64_t microbatch, const Compute& compute);
  /// Records `task` again.
  void repeat(const Task& task);
  bool is_learned(int64_t microbatch) const;

  RankRecorder& recorder_;
  PlannedMemory& memory_;
  int64_t num_microbatches_ = 0, repeated_ = 0;
  bool forward_only_ = false, failed_ = false;
  std::map<int64_t, Known> forwards_, backwards_;          ///< by chunk
  std::map<std::pair<int64_t, int64_t>, Kept> in_flight_;  ///< repeated: by chunk and micro-batch
};

}  // namespace lockstep
