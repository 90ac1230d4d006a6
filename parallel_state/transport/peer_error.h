#pragma once

// Internal. No libtorch here.

#include <cstdint>
#include <string>

#include "lockstep/core/error.h"

namespace lockstep {

/// An error that involves another rank of a group, identified by its position in the group.
class PeerError : public CommunicationError {
 public:
  /// `before`, the rank, `after`. what() says "rank 1 of the group".
  PeerError(std::string before, int peer, std::string after)
      : CommunicationError(before + "rank " + std::to_string(peer) + " of the group" + after),
        before_(std::move(before)),
        after_(std::move(after)),
        peer_(peer) {}

  int peer() const { return peer_; }
  /// The same with the global rank: "rank 5".
  std::string text(int64_t global_rank) const {
    return before_ + "rank " + std::to_string(global_rank) + after_;
  }

 private:
  std::string before_, after_;
  int peer_;
};

}  // namespace lockstep
