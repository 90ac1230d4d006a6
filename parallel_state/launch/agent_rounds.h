#pragma once

// Internal.

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep {

/// The rounds of a job in the store of torchrun's agent: one each time that its ranks start, or
/// meet again. The environment does not tell a rank its round: each agent counts only the failures
/// of its own ranks, and store and port stay. But when torchrun starts ranks, those of the round
/// before have ended (with a static rendezvous some may still train, or are about to end if they
/// were still meeting). So rank 0 begins a round and tells its number to every rank that has come
/// since: a rank takes a ticket that no process has had before, and only a rank 0 that lives and
/// has not met all ranks can answer it.
class AgentRounds {
 public:
  /// One object for each process and round.
  AgentRounds(const c10::intrusive_ptr<c10d::Store>& store, const std::string& run_id);

  /// For rank 0. Returns the number of the new round; the first is 0.
  int64_t begin();
  /// For rank 0, until all ranks have met, and a moment longer if their configurations do not fit
  /// or one of them has failed: tells the number to the ranks that have come meanwhile.
  void admit();
  /// For the other ranks. Returns the number of the round, or nothing if rank 0 does not tell it
  /// before `deadline` or before `give_up`, which is called repeatedly, says to stop. `ranks`: how
  /// many may be waiting.
  std::optional<int64_t> await(int64_t ranks, std::chrono::steady_clock::time_point deadline,
                               const std::function<bool()>& give_up = {});

 private:
  c10::intrusive_ptr<c10d::Store> keys_;
  int64_t number_ = 0;
  int64_t admitted_ = 0;  ///< the tickets up to this one are answered
};

}  // namespace lockstep
