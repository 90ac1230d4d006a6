#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <future>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/core/check.h"

namespace lockstep {

/// Threads that turn jobs into results, which are returned in the order of the jobs. Only one
/// thread may call it.
template <class Job, class Result>
class OrderedWorkers {
 public:
  using Work = std::function<Result(Job)>;

  /// Each thread calls `make_work` once to get the function for its jobs. If that or the function
  /// throws, next() throws in place of the result. UsageError if the system does not start that
  /// many threads.
  OrderedWorkers(size_t threads, std::function<Work()> make_work) {
    try {
      while (threads_.size() < threads)
        threads_.emplace_back([this, make_work] { run(make_work); });
    } catch (const std::system_error& error) {
      stop();
      fail<UsageError>("could start only {} of {} threads: {}", threads_.size(), threads,
                       error.what());
    }
  }

  /// Drops jobs that no thread has started.
  ~OrderedWorkers() { stop(); }
  OrderedWorkers(const OrderedWorkers&) = delete;
  OrderedWorkers& operator=(const OrderedWorkers&) = delete;

  void submit(Job job) {
    Task task{std::move(job), {}};
    results_.push_back(task.result.get_future());
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(std::move(task));
    }
    changed_.notify_one();
  }

  /// Jobs whose results next() has not returned.
  size_t pending() const { return results_.size(); }

  /// The result of the oldest pending job; waits for it.
  Result next() {
    std::future<Result> oldest = std::move(results_.front());
    results_.pop_front();
    return oldest.get();
  }

 private:
  struct Task {
    Job job;
    std::promise<Result> result;
  };

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void run(const std::function<Work()>& make_work) {
    Work work;
    std::exception_ptr failure;
    try {
      work = make_work();
    } catch (...) {
      failure = std::current_exception();
    }
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closing_ || !waiting_.empty(); });
      if (closing_) return;
      Task task = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      try {
        if (failure) std::rethrow_exception(failure);
        task.result.set_value(work(std::move(task.job)));
      } catch (...) {
        task.result.set_exception(std::current_exception());
      }
    }
  }

  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> waiting_;
  bool closing_ = false;
  std::deque<std::future<Result>> results_;
};

}  // namespace lockstep
