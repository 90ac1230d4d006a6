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
  std::string what;  ///< name of a kernel; empty: bookkeeping
  std::function<void()> run;
  /// Hurries the streams that the task waits for; may be empty. Called when somebody waits for the
  /// task.
  std::function<void()> hurry = {};
};

/// Runs the tasks of one stream on a thread. Lives until the process ends.
class StreamWorker {
 public:
  explicit StreamWorker(c10::Stream stream) : stream_(stream) {}

  /// Returns the task's position: how many tasks have been pushed, including this one.
  int64_t push(StreamTask task);
  bool idle();
  /// Called when somebody waits for the first `count` tasks: they are no longer delayed.
  void hurry(int64_t count);
  /// Hurries, and waits until all tasks pushed so far are done or the process ends.
  void wait();
  /// Waits until no task is running; none starts after stop_streams().
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
  std::function<void()> current_hurry_;  ///< of the running task
  bool has_thread_ = false;
  bool busy_ = false;
  std::minstd_rand random_;  ///< of the thread
  uint64_t generation_ = ~uint64_t{0};
};

/// No stream starts another task. Called during process exit.
void stop_streams();
bool streams_stopped();

}  // namespace lockstep::testing
