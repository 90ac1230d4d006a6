#include "lockstep/datasets/microbatch_loader.h"

#include <pthread.h>
#include <signal.h>

#include <chrono>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

/// Signals go to the other threads of the process, except those that an instruction of this thread
/// raises: Linux ends the process at such a signal if it is blocked, and calls no handler.
void leave_signals_to_other_threads() {
  sigset_t blocked;
  ::sigfillset(&blocked);
  for (const int fault : {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGTRAP})
    ::sigdelset(&blocked, fault);
  ::pthread_sigmask(SIG_BLOCK, &blocked, nullptr);
}

}  // namespace

MicrobatchLoader::MicrobatchLoader(std::unique_ptr<SampleSource> source, BatchSchedule schedule,
                                   Options options)
    : source_(std::move(source)), schedule_(std::move(schedule)), options_(options) {
  require<UsageError>(
      options.seq_length > 0 && options.ranks > 0 && options.rank >= 0 &&
          options.rank < options.ranks && options.prefetch >= 0,
      "MicrobatchLoader: found {} tokens, rank {} of {}, {} ahead, allowed: >= 1, a "
      "rank, >= 0",
      options.seq_length, options.rank, options.ranks, options.prefetch);
}

MicrobatchLoader::~MicrobatchLoader() { stop(); }

void MicrobatchLoader::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void MicrobatchLoader::seek(int64_t consumed_samples) {
  const bool failed = [&] {
    const std::lock_guard lock(mutex_);
    return error_ != nullptr;
  }();
  if (next_consumed_ == consumed_samples && next_number_ == 0 && !failed) return;
  stop();
  ready_.clear();
  error_ = nullptr;
  consumed_samples_ = next_consumed_ = consumed_samples;
  number_ = next_number_ = 0;
}

void MicrobatchLoader::advance(int64_t& consumed_samples, int64_t& number) const {
  const BatchSizes sizes = schedule_.at(consumed_samples);
  if (++number < sizes.num_microbatches) return;
  number = 0;
  consumed_samples += sizes.global;
}

Microbatch MicrobatchLoader::read() {
  const BatchSizes sizes = schedule_.at(consumed_samples_);
  Microbatch batch{.consumed_samples = consumed_samples_,
                   .number = number_,
                   .samples = microbatch_samples(consumed_samples_, sizes.micro, number_,
                                                 options_.rank, options_.ranks),
                   .ids = {},
                   .marks = {}};
  const auto length = static_cast<size_t>(options_.seq_length + 1);
  batch.ids.resize(static_cast<size_t>(sizes.micro) * length);
  std::span<int64_t> left(batch.ids);
  for (int64_t sample = batch.samples.first; sample < batch.samples.last; ++sample) {
    source_->read(sample, left.first(length));
    batch.marks.push_back(source_->marks(sample, left.first(length)));
    left = left.subspan(length);
  }
  advance(consumed_samples_, number_);
  return batch;
}

void MicrobatchLoader::read_ahead() {
  std::unique_lock lock(mutex_);
  while (!error_) {
    changed_.wait(
        lock, [&] { return stopping_ || static_cast<int64_t>(ready_.size()) < options_.prefetch; });
    if (stopping_) return;
    lock.unlock();
    std::exception_ptr error;
    Microbatch batch;
    try {
      batch = read();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error)
      error_ = error;
    else
      ready_.push_back(std::move(batch));
    changed_.notify_all();
  }
}

Microbatch MicrobatchLoader::next() {
  Microbatch batch = take();
  advance(next_consumed_, next_number_);
  return batch;
}

Microbatch MicrobatchLoader::take() {
  const auto begin = std::chrono::steady_clock::now();
  const auto waited = [&] {
    seconds_waited_ +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  if (options_.prefetch == 0) {
    Microbatch batch = read();
    waited();
    return batch;
  }
  if (!thread_.joinable()) {
    stopping_ = false;
    thread_ = std::thread([this] {
      leave_signals_to_other_threads();
      read_ahead();
    });
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return error_ || !ready_.empty(); });
  waited();
  if (ready_.empty()) std::rethrow_exception(error_);
  Microbatch batch = std::move(ready_.front());
  ready_.pop_front();
  changed_.notify_all();
  return batch;
}

}  // namespace lockstep
