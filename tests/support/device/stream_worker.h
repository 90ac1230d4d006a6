#pragma once

// Internal.

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <random>
#include <string>

#include <c10/core/Stream.h>

namespace lockstep::testing {

struct StreamTask {
  std::string what;  ///< of a kernel; empty: bookkeeping
  std::function<void()> run;
  /// Hurries the streams that the task waits for; may be empty. Is called when somebody waits for
  /// the task.
  std::function<void()> hurry = {};
};

/// The thread of one stream. Lives until the process ends.
class StreamWorker {
 public:
  explicit StreamWorker(c10::Stream stream) : stream_(stream) {}

  /// Returns how many have been pushed, this one included: its place.
  int64_t push(StreamTask task);
  bool idle();
  /// Somebody waits for the first `count` tasks, which are no longer delayed.
  void hurry(int64_t count);
  /// Hurries, until all tasks pushed so far are done, or the process ends.
  void wait();
  /// Until no task is under way; none begins after stop_streams().
  void wait_parked(std::chrono::steady_clock::time_point deadline);

 private:
  void work();
  void perform(StreamTask& task);
  std::chrono::duration<double> next_delay();
  void delay();

  c10::Stream stream_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<StreamTask> tasks_;
  int64_t pushed_ = 0;
  int64_t done_ = 0;
  int64_t hurried_ = 0;
  std::function<void()> current_hurry_;  ///< of the task under way
  bool has_thread_ = false;
  bool busy_ = false;
  std::minstd_rand random_;  ///< of the thread
  uint64_t generation_ = ~uint64_t{0};
};

/// No stream begins another task. The process calls it as it ends.
void stop_streams();
bool streams_stopped();

}  // namespace lockstep::testing
