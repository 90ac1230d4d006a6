#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace c10d {
class ProcessGroup;
}

namespace lockstep {

/// Ranks that communicate with each other. A handle: copies refer to the same group. Created by
/// ParallelState. A group of one rank has no communicator, and its collectives do nothing.
class ProcessGroup {
 public:
  struct State;  // holds the c10d group; see process_group_state.h
  explicit ProcessGroup(std::shared_ptr<const State> state) : state_(std::move(state)) {}

  /// "dp-cp", ...
  const std::string& name() const;
  /// Global ranks of the members, in group order.
  const std::vector<int64_t>& ranks() const;
  /// Number of members.
  int64_t size() const { return static_cast<int64_t>(ranks().size()); }
  /// Position of this rank in the group.
  int64_t rank() const;
  /// Timeout after which an unfinished communication fails.
  std::chrono::milliseconds timeout() const;
  /// "dp-cp [0, 1]", for messages.
  std::string to_string() const;

  /// Tells the other ranks of the job that this one has failed, so that ranks waiting for it throw
  /// CommunicationError with `message` instead of waiting for the timeout. The job's groups cannot
  /// be used afterwards. Never throws.
  void post_failure(const std::string& message) const noexcept;

  /// The c10d group, for code that talks to c10d itself (a c10d::Reducer, a user's own collective).
  /// nullptr for a group of one rank.
  c10d::ProcessGroup* c10d_group() const;

  /// For the functions of collectives.h.
  const std::shared_ptr<const State>& shared_state() const { return state_; }

 private:
  std::shared_ptr<const State> state_;
};

}  // namespace lockstep
