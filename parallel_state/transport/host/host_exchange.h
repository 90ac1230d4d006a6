#pragma once

// Internal.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/parallel_state/direct_memory.h"
#include "lockstep/parallel_state/host_transfers.h"
#include "lockstep/parallel_state/ordered_reduction.h"
#include "lockstep/parallel_state/pending.h"

namespace lockstep {

class HostExchange;

/// A collective that a thread of HostExchange runs, or the thread that waits for it.
class HostTask : public Pending {
 public:
  /// Waits up to `patience`. Returns whether the task has ended; throws what made it fail.
  bool wait_for(std::chrono::milliseconds patience);
  /// Once it has returned or thrown, nobody uses the task's tensors any more.
  void wait(const Waiting& waiting) override;
  void abandon() override;
  bool is_completed() const override;

 private:
  friend class HostExchange;
  void end(std::exception_ptr error);
  void abandon(const std::exception_ptr& error);

  HostExchange* exchange_ = nullptr;
  std::mutex mutex_;
  std::condition_variable ended_;
  std::atomic<bool> done_ = false;
  std::atomic<int> awaited_ = -1;  ///< the peer whose offer it waits for; -1: none
  std::exception_ptr error_;
};

/// Collectives on the host, made of transfers between all pairs of ranks of a group. In a reduction
/// each rank owns one slice, collects the terms of the others, adds them in rank order and, for an
/// all-reduce, distributes the sum to all. A rank sends (n - 1) / n of its input for a
/// reduce-scatter, where Gloo's own sends it n times, and the parts of an all-gather arrive
/// directly in place. Sums have the same bits whatever the size of the message, whether all-reduce
/// or reduce-scatter computed them, and however they were transferred.
///
/// If all ranks are on one host and may read each other's memory (DirectMemory and OfferBoard;
/// greet() finds that out), parts are read from there, and all ranks read a broadcast from its
/// source. Otherwise parts are messages, and a broadcast uses a binomial tree.
///
/// A reduction is cut into chunks; a chunk is added while it is in the cache, and while the next
/// message arrives. Tasks start in the order of the calls, which must be the same on all ranks. Two
/// threads run them. Where memory is read, a thread that waits for a task that has not started yet
/// runs it, and those before it, itself: that takes less time than waking another. There a task
/// waits for those that come OfferBoard::kCalls or more before it.
///
/// The tag of a message is made of its number of bytes, the `identity` of the call and its place
/// among the calls, modulo 32: a task waits while one with the same tags is in progress, so that a
/// worker that the system delays cannot receive the messages of a later call. If ranks do not do
/// the same, their messages do not match, and the call times out; Gloo would end the process at a
/// message of a different size, or accept the wrong one.
class HostExchange {
 public:
  /// Whether the ranks of a group read each other's memory.
  enum class Reading {
    never,     ///< no rank asks: an observer wants to see every byte. The same on all ranks
    declined,  ///< this rank does not offer its own memory
    offered,   ///< if all ranks offer their memory and can read the others'
  };

  /// Uses `backend`, which must be able to send and receive CPU tensors.
  HostExchange(c10::intrusive_ptr<c10d::Backend> backend, std::chrono::milliseconds timeout);
  /// Abandons what is still in progress.
  ~HostExchange();
  HostExchange(const HostExchange&) = delete;
  HostExchange& operator=(const HostExchange&) = delete;

  /// Returns when all members have connected: if a member ended earlier, that would look like a
  /// failure to members that are still connecting. They then know whether they read memory
  /// directly. Must be the first call on every rank.
  void greet(Reading reading);
  /// How ranks read; nullptr if everything is sent. Call it after greet().
  const DirectReading* direct_reading() const { return direct_ ? &*direct_ : nullptr; }

  /// Runs the task, and those before it, on this thread if no other thread has started them.
  /// `check` as for HostTransfers.
  void run_queued(const HostTask& task, const std::function<void()>& check);
  /// Ends the tasks in progress soon; later ones end at once, with that error unless another came
  /// first. No other rank reads this one's memory any more.
  void give_up(const std::exception_ptr& error);

  /// Tensors are contiguous; a task keeps their memory alive, but not their autograd graphs.
  /// `tensor` [n elements], in place.
  std::shared_ptr<HostTask> all_reduce(const at::Tensor& tensor, const HostReduction& reduction,
                                       uint64_t identity);
  /// `input` [size * n elements] -> `output` [n elements], which may be this rank's part of
  /// `input`.
  std::shared_ptr<HostTask> reduce_scatter(const at::Tensor& output, const at::Tensor& input,
                                           const HostReduction& reduction, uint64_t identity);
  /// `input` [n elements] -> `output` [size * n elements]; `input` may be this rank's part of
  /// `output`.
  std::shared_ptr<HostTask> all_gather(const at::Tensor& output, const at::Tensor& input,
                                       uint64_t identity);
  /// Part i of `input` has input_bytes[i] bytes and goes to rank i.
  std::shared_ptr<HostTask> all_to_all(const at::Tensor& output, const at::Tensor& input,
                                       std::vector<int64_t> output_bytes,
                                       std::vector<int64_t> input_bytes, uint64_t identity);
  std::shared_ptr<HostTask> broadcast(const at::Tensor& tensor, int source, uint64_t identity);

 private:
  struct Entry {
    std::shared_ptr<HostTask> task;
    std::function<void(HostTransfers&)> body;
    uint64_t identity;
    uint64_t number;
    std::string trace_name;  ///< empty if nothing records
  };

  std::shared_ptr<HostTask> enqueue(uint64_t identity, std::function<void(HostTransfers&)> body);
  /// Needs the lock. Does nothing if there is a worker and the system does not allow another.
  void add_worker();
  void work();
  /// Runs the first task of the queue, which may start, without the lock.
  void run_first(std::unique_lock<std::mutex>& lock, HostScratch& scratch,
                 const std::function<void()>& check);
  bool is_queued(const HostTask& task) const;
  /// Returns the error, if there is one.
  std::exception_ptr run(const Entry& entry, HostTransfers& transfers);
  bool may_start(const Entry& entry) const;
  /// Ends what is under way, and the others' reads of this rank's memory. Needs the lock.
  void abandon();
  template <class T>
  std::vector<T> gather_now(const T& mine);
  bool agree_on_reading(bool offers_memory);

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::chrono::milliseconds timeout_;
  int rank_;
  int size_;
  std::unique_ptr<DirectMemory> memory_;
  std::unique_ptr<OfferBoard> board_;
  std::optional<DirectReading> direct_;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Entry> queue_;
  std::vector<std::thread> workers_;
  std::vector<HostMessages*> under_way_;
  std::vector<HostScratch> scratch_;  ///< of threads that wait, between two tasks
  std::exception_ptr broken_;  ///< what made the first task fail; later tasks fail in the same way
  int idle_ = 0;
  uint64_t next_ = 0;
  bool ended_ = false;
};

}  // namespace lockstep
