#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "lockstep/parallel_state/collective_record.h"

namespace lockstep::testing {

/// Calls of all ranks, each rank's in its order. Thread-safe.
template <class Call>
class CallLog {
 public:
  void add(Call call) {
    const std::lock_guard<std::mutex> lock(mutex_);
    calls_.push_back(std::move(call));
  }

  std::vector<Call> of_rank(int64_t rank) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Call> result;
    for (const Call& call : calls_)
      if (call.rank == rank) result.push_back(call);
    return result;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<Call> calls_;
};

/// The collectives of lockstep/parallel_state/collectives.h, as they were called.
using CollectiveLog = CallLog<CollectiveRecord>;

/// One call that reached the backend of a group: what c10d was asked to do.
struct BackendCall {
  int64_t rank = 0;  ///< global rank that made the call
  std::string group;
  std::string operation;  ///< "allreduce", "broadcast", "send", ...
  int64_t bytes = 0;      ///< of the rank's input; of a recv, of its output
};

using BackendLog = CallLog<BackendCall>;

}  // namespace lockstep::testing
