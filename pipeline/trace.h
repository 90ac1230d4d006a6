#pragma once

#include <cstdint>
#include <mutex>
#include <ostream>
#include <string>
#include <vector>

namespace lockstep {

/// An action of a pipeline rank from `begin` to `end`, in ns of std::chrono's steady clock.
struct TraceEvent {
  /// task: a stage ran. wait: the rank was idle, waiting for an input. send: from the start of a
  /// transfer until the other side had the tensor. receive: from when the rank was ready for an
  /// input until it took it. Transfers may overlap tasks and each other. On CUDA these are the
  /// times of the calls, not of the device.
  enum class Kind { task, wait, send, receive };
  Kind kind = Kind::task;
  int64_t rank = 0;       ///< in the pipeline
  std::string name = {};  ///< of the task, "F0.1"; for a transfer, the task that takes the tensor
  int64_t begin = 0;
  int64_t end = 0;
};

/// "task", "wait", "send", "receive"
const char* to_string(TraceEvent::Kind kind);

/// Events of one or more ranks. Thread-safe.
class PipelineTrace {
 public:
  void add(TraceEvent event);

  /// Sorted by begin.
  std::vector<TraceEvent> events() const;

  /// Writes the format of chrome://tracing and Perfetto: a process for each rank, with one row for
  /// tasks and waits, one for sends and one for receives. Times count from the first event.
  void write_chrome_trace(std::ostream& out) const;

 private:
  mutable std::mutex mutex_;
  std::vector<TraceEvent> events_;
};

}  // namespace lockstep
