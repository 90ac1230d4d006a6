#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace at {
struct RecordFunction;
class RecordFunctionGuard;
}  // namespace at

/// Names in traces. libtorch's profiler (Kineto, `lockstep train --profile`) shows them between its
/// own operators. While nothing records, a scope costs two function calls and builds no name.
namespace lockstep {

/// Whether a profiler of this process, or of this thread, records.
bool trace_is_recording();

/// Names what this thread does during the scope's life.
class TraceScope {
 public:
  /// name() -> std::string or std::string_view; called only while a profiler records. Quotation
  /// marks become apostrophes; other characters that Kineto does not write become '?'.
  template <class Name>
  explicit TraceScope(Name name) {
    if (trace_is_recording()) begin(name());
  }
  ~TraceScope();
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

 private:
  void begin(std::string_view name);

  std::unique_ptr<at::RecordFunction> function_;
};

/// Names what other threads do on behalf of this one: whatever hands them a task during its life
/// asks current() and opens a TraceScope of that name around the task.
class TraceName {
 public:
  /// `name` as in TraceScope.
  template <class Name>
  explicit TraceName(Name name) {
    if (trace_is_recording()) set(std::string(name()));
  }
  ~TraceName();
  TraceName(const TraceName&) = delete;
  TraceName& operator=(const TraceName&) = delete;

  /// The name that was set last on this thread and is still in effect; empty if there is none.
  static std::string current();

 private:
  void set(std::string name);

  std::string name_;
  const std::string* outer_ = nullptr;
  bool set_ = false;
};

/// During its life, keeps what libtorch and c10d name on this thread out of traces: c10d's own
/// slices last until a message has arrived, so that they overlap other slices of their thread.
class TraceSilence {
 public:
  /// Does nothing unless `on`; pass trace_is_recording().
  explicit TraceSilence(bool on);
  ~TraceSilence();
  TraceSilence(const TraceSilence&) = delete;
  TraceSilence& operator=(const TraceSilence&) = delete;

 private:
  std::unique_ptr<at::RecordFunctionGuard> guard_;
};

}  // namespace lockstep
