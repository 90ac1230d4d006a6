#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <list>
#include <mutex>
#include <thread>

#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "lockstep/parallel_state/c10d_parts.h"

namespace lockstep::testing {

/// A launch on a communicator's stream, like c10d's WorkNCCL: wait() makes the current stream wait
/// for it and returns. The host does not learn of failures unless it passes a timeout.
class NcclWork : public c10d::Work, public KeepsOutputs {
 public:
  /// Keeps tensors from the allocator, which does not know that another stream uses them. Keeps
  /// them until the current stream waits or, once the work has ended, until the rank's next launch.
  class Shelf {
   public:
    void put(const std::vector<at::Tensor>& tensors);
    void clear();

   private:
    std::mutex mutex_;
    std::vector<at::Tensor> tensors_;
  };

  struct Spec {
    c10::Device device;
    int rank;
    c10d::OpType type;
    std::string name;  ///< for messages: "rank 1, group dp[0, 1], allreduce, sequence 4"
    uint64_t sequence;
    std::chrono::milliseconds timeout;
    std::function<void()> abort;         ///< aborts the communicator
    std::function<std::string()> error;  ///< error of the communicator; empty: none
    bool blocks_host = false;            ///< wait() also blocks the host, as for a barrier
  };

  NcclWork(Spec spec, std::vector<at::Tensor> outputs);

  /// Records the end after everything that `stream` has to do. Without it the work counts as done,
  /// and wait() returns: such are the works that calls in a batch return.
  void record_end(const c10::Stream& stream);

  bool isCompleted() override;
  bool isSuccess() const override;
  /// With a timeout, the host waits. When it expires, the communicator is aborted.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override { spec_.abort(); }
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  uint64_t getSequencenumber() const override { return spec_.sequence; }
  c10::intrusive_ptr<c10d::Work> without_outputs() const override;

  const Spec& spec() const { return spec_; }
  const std::shared_ptr<Shelf>& shelf() const { return shelf_; }
  const std::shared_ptr<c10::Event>& end() const { return end_; }

 private:
  const Spec spec_;
  std::vector<at::Tensor> outputs_;
  std::shared_ptr<c10::Event> end_;
  std::shared_ptr<Shelf> shelf_ = std::make_shared<Shelf>();
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

/// Checks the works of one backend on its own thread, like c10d's watchdog.
class NcclWatchdog {
 public:
  /// `on_timeout` gets a message about each work that has not ended within its timeout after the
  /// launch.
  explicit NcclWatchdog(std::function<void(const std::string&)> on_timeout);
  /// Joins the thread.
  ~NcclWatchdog();

  void watch(const NcclWork& work);
  /// Whether all works have ended.
  bool idle();
  /// Ends the checks. Does not join: the watchdog may call it itself.
  void stop();

 private:
  struct Watched {
    NcclWork::Spec spec;
    std::shared_ptr<c10::Event> end;
    std::shared_ptr<NcclWork::Shelf> shelf;
    std::chrono::steady_clock::time_point launched;
    bool reported = false;
  };

  void look_out();
  /// Removes works that have ended. Returns a message for each work that is newly overdue.
  std::vector<std::string> look();

  std::function<void(const std::string&)> on_timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Watched> under_way_;
  /// Shelves of ended works. They are cleared on the rank's thread: the last tensor of an autograd
  /// graph must not be freed on the watchdog's.
  std::vector<std::shared_ptr<NcclWork::Shelf>> to_clear_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace lockstep::testing
