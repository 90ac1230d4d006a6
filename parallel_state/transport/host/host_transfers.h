#pragma once

// Internal.

#include <atomic>
#include <deque>
#include <functional>

#include "lockstep/parallel_state/direct_memory.h"
#include "lockstep/parallel_state/host_messages.h"
#include "lockstep/parallel_state/offer_board.h"

namespace lockstep {

/// What ranks of one host that read each other's memory do it with.
struct DirectReading {
  DirectMemory& memory;
  OfferBoard& board;
};

/// What one task of HostExchange gives to its peers and takes from them. Ranks that cannot read
/// each other's memory send parts as messages. Otherwise parts are read: their owner offers them on
/// the board, and each offer is taken from there once the part has been read. That is one copy, by
/// the rank that needs the data, instead of two copies and a trip through the system's sockets, for
/// which other threads must wake up.
///
/// An offer names the call and the number of bytes; an offer of another number of bytes than
/// expected is a CommunicationError, and one of another call is not taken. Nothing is offered where
/// there are no bytes, so a rank that expects some then times out. Used by one thread.
class HostTransfers {
 public:
  /// A part that a peer offers, or will offer.
  class Source {
    friend class HostTransfers;
    int peer_ = 0;
    int stage_ = 0;
    int64_t bytes_ = 0;
    uint64_t address_ = 0;
    bool offered_ = false;
  };

  /// For call `number` of that identity. `scratch` belongs to the thread. `reading`: by the ranks
  /// of the group; nullptr if everything is to be sent. `check` is called from time to time while
  /// an offer is waited for, and throws to end that. `awaited` gets the peer that it waits for.
  HostTransfers(c10d::Backend& backend, std::chrono::milliseconds timeout, HostScratch& scratch,
                const DirectReading* reading, uint64_t identity, uint64_t number,
                std::function<void()> check, std::atomic<int>& awaited)
      : reading_(reading),
        timeout_(timeout),
        awaited_(awaited),
        check_(std::move(check)),
        identity_(identity),
        number_(number),
        messages_(backend, timeout, scratch, identity, number) {}

  HostMessages& messages() { return messages_; }

  /// Whether parts are read. The same on all ranks of the group.
  bool direct() const { return reading_ != nullptr; }

  /// Memory must live, and keep its values, until finish() has returned; what is received is there
  /// then. At most one part per stage from one rank to another, and stage < OfferBoard::kStages.
  void send(std::byte* data, int64_t bytes, int peer, int stage = 0);
  void receive(std::byte* data, int64_t bytes, int peer, int stage = 0);

  /// Lets `peer` read. finish() waits until it has.
  void offer(const std::byte* data, int64_t bytes, int peer, int stage = 0);
  /// Expects such an offer from `peer`. The reference is valid as long as this object.
  Source& expect(int64_t bytes, int peer, int stage = 0);
  /// Reads bytes begin ... begin + bytes of the part; waits for the offer first.
  void read(Source& source, int64_t begin, int64_t bytes, std::byte* to);
  /// Takes the offer from the board: it will not be read any more.
  void release(Source& source);

  /// Reads what the peers have offered with send(), and waits for everything that was posted.
  void finish();

 private:
  struct Offered {
    int peer, stage;
    OfferBoard::Offer offer;
    OfferBoard::Ticket ticket;
  };
  struct Reading {
    Source& source;
    std::byte* to;
  };

  /// Throws once `peer` cannot answer any more, and after the timeout.
  OfferBoard::Check checks(int peer);
  void await_offer(Source& source);
  void read_whole(const Reading& reading);

  const DirectReading* reading_;
  const std::chrono::milliseconds timeout_;
  std::atomic<int>& awaited_;
  const std::function<void()> check_;
  const uint64_t identity_, number_;
  std::vector<Offered> offered_;
  std::deque<Source> sources_;
  std::vector<Reading> readings_;
  HostMessages messages_;  ///< destroyed first: it may still write to the other members
};

}  // namespace lockstep
