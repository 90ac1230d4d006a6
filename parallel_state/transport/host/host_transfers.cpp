#include "lockstep/parallel_state/host_transfers.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/peer_error.h"
#include "lockstep/parallel_state/pending.h"

namespace lockstep {
namespace {

/// Bytes that are read at a time: an aborted task stops in between.
constexpr int64_t kReadBytes = 1 << 20;

}  // namespace

void HostTransfers::send(std::byte* data, int64_t bytes, int peer, int stage) {
  if (direct())
    offer(data, bytes, peer, stage);
  else
    messages_.send(data, bytes, peer, stage);
}

void HostTransfers::receive(std::byte* data, int64_t bytes, int peer, int stage) {
  if (direct())
    readings_.push_back({expect(bytes, peer, stage), data});
  else
    messages_.receive(data, bytes, peer, stage);
}

OfferBoard::Check HostTransfers::checks(int peer) {
  return [this, peer, end = std::chrono::steady_clock::now() + timeout_] {
    awaited_ = peer;
    messages_.check_not_given_up();
    reading_->memory.check(peer);
    const auto timed_out = [peer] { return PeerError("", peer, ": timed out"); };
    try {
      if (check_) check_();
    } catch (const TimedOut&) {
      throw timed_out();
    }
    if (std::chrono::steady_clock::now() >= end) throw timed_out();
  };
}

void HostTransfers::offer(const std::byte* data, int64_t bytes, int peer, int stage) {
  if (bytes == 0) return;
  const OfferBoard::Offer offer = {identity_, number_, reinterpret_cast<uintptr_t>(data), bytes};
  offered_.push_back({peer, stage, offer, reading_->board.put(peer, stage, offer, checks(peer))});
}

HostTransfers::Source& HostTransfers::expect(int64_t bytes, int peer, int stage) {
  Source& source = sources_.emplace_back();
  source.peer_ = peer;
  source.stage_ = stage;
  source.bytes_ = bytes;
  source.offered_ = bytes == 0;
  return source;
}

void HostTransfers::await_offer(Source& source) {
  if (source.offered_) return;
  const OfferBoard::Offer found = reading_->board.wait_offered(
      source.peer_, source.stage_, identity_, number_, checks(source.peer_));
  awaited_ = -1;
  if (found.bytes != source.bytes_)
    throw PeerError("", source.peer_,
                    fmt::format(" offers {} bytes for call {} ({:016x}), expected {}", found.bytes,
                                number_, identity_, source.bytes_));
  source.address_ = found.address;
  source.offered_ = true;
}

void HostTransfers::read(Source& source, int64_t begin, int64_t bytes, std::byte* to) {
  await_offer(source);
  messages_.check_not_given_up();
  reading_->memory.read(source.peer_, to, source.address_ + static_cast<uint64_t>(begin), bytes);
}

void HostTransfers::release(Source& source) {
  await_offer(source);
  if (source.bytes_ > 0) reading_->board.take(source.peer_, source.stage_, identity_, number_);
}

void HostTransfers::read_whole(const Reading& reading) {
  const int64_t bytes = reading.source.bytes_;
  for (int64_t at = 0; at < bytes; at += kReadBytes)
    read(reading.source, at, std::min(kReadBytes, bytes - at), reading.to + at);
  release(reading.source);
}

void HostTransfers::finish() {
  for (const Reading& reading : readings_) read_whole(reading);
  for (const Offered& offered : offered_)
    reading_->board.wait_taken(offered.peer, offered.stage, offered.offer, offered.ticket,
                               checks(offered.peer));
  messages_.finish();
}

}  // namespace lockstep
