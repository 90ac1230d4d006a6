#include "lockstep/tests/support/device/stream_worker.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>

#include "lockstep/tests/support/device/device_state.h"

namespace lockstep::testing {
namespace {

constexpr std::chrono::seconds kIdleThreadEndsAfter{2};

std::atomic<bool> streams_are_stopped{false};

}  // namespace

void stop_streams() { streams_are_stopped = true; }
bool streams_stopped() { return streams_are_stopped; }

int64_t StreamWorker::push(StreamTask task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  ++pushed_;
  if (!has_thread_ && !streams_stopped()) {
    has_thread_ = true;
    std::thread([this] { work(); }).detach();
  }
  changed_.notify_all();
  return pushed_;
}

bool StreamWorker::idle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_ == pushed_;
}

void StreamWorker::hurry(int64_t count) {
  std::vector<std::function<void()>> waited_for;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (std::max(hurried_, done_) >= count) return;
    hurried_ = count;
    if (current_hurry_) waited_for.push_back(current_hurry_);
    const auto queued = static_cast<int64_t>(tasks_.size());
    for (int64_t i = 0; i < queued && pushed_ - queued + i < count; ++i)
      if (tasks_[static_cast<size_t>(i)].hurry)
        waited_for.push_back(tasks_[static_cast<size_t>(i)].hurry);
  }
  changed_.notify_all();
  for (const auto& other : waited_for) other();  // without the lock: streams may wait in a cycle
}

void StreamWorker::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  const int64_t last = pushed_;
  lock.unlock();
  hurry(last);
  lock.lock();
  while (done_ < last && !streams_stopped())
    changed_.wait_for(lock, std::chrono::milliseconds(100));
}

void StreamWorker::wait_parked(std::chrono::steady_clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_until(lock, deadline, [this] { return !busy_; });
}

void StreamWorker::work() {
  at::set_num_threads(1);
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below;
  for (;;) {
    StreamTask task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait_for(lock, kIdleThreadEndsAfter, [this] { return !tasks_.empty(); });
      if (tasks_.empty() || streams_stopped()) {
        has_thread_ = false;
        return;
      }
      task = std::move(tasks_.front());
      tasks_.pop_front();
      current_hurry_ = task.hurry;
      busy_ = true;
    }
    perform(task);
    task = {};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      current_hurry_ = nullptr;
      busy_ = false;
      ++done_;
    }
    changed_.notify_all();
  }
}

void StreamWorker::perform(StreamTask& task) {
  const bool is_kernel = !task.what.empty();
  if (is_kernel && has_device_error(stream_.device_index())) return;
  if (is_kernel) delay();
  try {
    task.run();
  } catch (const c10::Error& error) {
    set_device_error(stream_.device_index(), task.what + ": " + error.what_without_backtrace());
  } catch (const std::exception& error) {
    set_device_error(stream_.device_index(), task.what + ": " + error.what());
  }
}

std::chrono::duration<double> StreamWorker::next_delay() {
  const Delays delays = current_delays();
  if (generation_ != delays.generation) {
    generation_ = delays.generation;
    std::seed_seq seed{delays.seed, static_cast<uint64_t>(stream_.device_index()),
                       static_cast<uint64_t>(stream_.id())};
    random_.seed(seed);
  }
  std::uniform_real_distribution<double> uniform(0, 1);
  const bool delayed = uniform(random_) < delays.share;
  return delays.longest * (delayed ? uniform(random_) : 0.0);
}

void StreamWorker::delay() {
  const auto length = next_delay();
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait_for(lock, length, [this] { return hurried_ > done_ || streams_stopped(); });
}

}  // namespace lockstep::testing
