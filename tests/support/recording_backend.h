#pragma once

#include <mutex>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace lockstep::testing {

/// One call that reached the backend of a group.
struct RecordedCollective {
  int64_t rank = 0;  ///< global rank that made the call
  std::string group;
  std::string operation;  ///< "allreduce", "broadcast", "allgather", ...
  int64_t bytes = 0;      ///< of the rank's input
  at::ScalarType dtype = at::kFloat;
  c10d::ReduceOp::RedOpType reduce_op = c10d::ReduceOp::UNUSED;

  bool operator==(const RecordedCollective&) const = default;
};

/// All calls of all ranks, each rank's in its order. Thread-safe.
class CollectiveLog {
 public:
  void add(RecordedCollective call);
  void clear();
  std::vector<RecordedCollective> of_rank(int64_t rank) const;

 private:
  mutable std::mutex mutex_;
  std::vector<RecordedCollective> calls_;
};

/// Passes every call on to `inner` and notes it in `log`.
c10::intrusive_ptr<c10d::Backend> make_recording_backend(c10::intrusive_ptr<c10d::Backend> inner,
                                                         CollectiveLog* log, std::string group,
                                                         int64_t global_rank);

}  // namespace lockstep::testing
