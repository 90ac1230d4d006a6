#pragma once

// Internal.

#include <deque>

#include "lockstep/parallel_state/direct_memory.h"
#include "lockstep/parallel_state/host_messages.h"

namespace lockstep {

/// What one task of HostExchange gives to its peers and takes from them. Small parts are messages.
/// Larger ones are read: their owner offers them, with a message that contains their address, and
/// each offer is answered once the part has been read. That is one copy, by the rank that needs the
/// data, instead of two copies and a trip through the system's sockets.
///
/// An offer names the call and the number of bytes; an offer that does not match what is expected
/// is a CommunicationError. Used by one thread.
class HostTransfers {
  /// An offer as it is sent. The answer is the same data sent back.
  struct Offer {
    uint64_t identity, number, address;
    int64_t bytes;
  };

 public:
  /// A part that a peer offers, or will offer.
  class Source {
    friend class HostTransfers;
    int peer_ = 0;
    int stage_ = 0;
    int64_t bytes_ = 0;
    Offer offer_ = {};
    HostMessages::Message arriving_;  ///< null once the offer is there
  };

  /// For call `number` of that identity. `scratch` belongs to the thread. `memory`: of the ranks of
  /// the group; nullptr if everything is to be sent.
  HostTransfers(c10d::Backend& backend, std::chrono::milliseconds timeout, at::Tensor& scratch,
                const DirectMemory* memory, uint64_t identity, uint64_t number)
      : memory_(memory),
        identity_(identity),
        number_(number),
        messages_(backend, timeout, scratch, identity, number) {}

  HostMessages& messages() { return messages_; }

  /// Whether parts of that size are read, see kDirectBytes. The same on all ranks of the group.
  bool direct(int64_t bytes) const;

  /// Memory must live, and keep its values, until finish() has returned; what is received is there
  /// then. At most one part per stage from one rank to another, and stage < 4.
  void send(std::byte* data, int64_t bytes, int peer, int stage = 0);
  void receive(std::byte* data, int64_t bytes, int peer, int stage = 0);

  /// Lets `peer` read, whatever the size. finish() waits for its answer.
  void offer(const std::byte* data, int64_t bytes, int peer, int stage = 0);
  /// Expects such an offer from `peer`. The reference is valid as long as this object.
  Source& expect(int64_t bytes, int peer, int stage = 0);
  /// Reads bytes begin ... begin + bytes of the part; waits for the offer first.
  void read(Source& source, int64_t begin, int64_t bytes, std::byte* to);
  /// Answers the offer: it will not be read any more.
  void release(Source& source);

  /// Reads what the peers have offered with send(), and waits for everything that was posted.
  void finish();

 private:
  struct Offered {
    int peer;
    Offer sent, answer;
    HostMessages::Message answered;
  };
  struct Reading {
    Source& source;
    std::byte* to;
  };

  void await_offer(Source& source);
  void check(const Offer& found, int64_t bytes, int peer) const;
  void read_whole(const Reading& reading);

  const DirectMemory* memory_;
  const uint64_t identity_, number_;
  std::deque<Offered> offered_;
  std::deque<Source> sources_;
  std::vector<Reading> readings_;
  HostMessages messages_;  ///< destroyed first: it may still write to the other members
};

}  // namespace lockstep
