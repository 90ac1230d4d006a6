#include "lockstep/parallel_state/host_transfers.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/host_chunks.h"
#include "lockstep/parallel_state/peer_error.h"

namespace lockstep {
namespace {

/// Bytes that are read at a time: an aborted task stops in between.
constexpr int64_t kReadBytes = 1 << 20;

/// The stages of a stage's control messages, distinct from those of data.
constexpr int kStages = 4;
int stage_of_offer(int stage) { return kStages + stage; }
int stage_of_answer(int stage) { return 2 * kStages + stage; }

template <class T>
std::byte* raw(T& value) {
  return reinterpret_cast<std::byte*>(&value);
}

}  // namespace

bool HostTransfers::direct(int64_t bytes) const { return memory_ && bytes >= kDirectBytes; }

void HostTransfers::send(std::byte* data, int64_t bytes, int peer, int stage) {
  if (direct(bytes))
    offer(data, bytes, peer, stage);
  else
    messages_.send(data, bytes, peer, stage);
}

void HostTransfers::receive(std::byte* data, int64_t bytes, int peer, int stage) {
  if (direct(bytes))
    readings_.push_back({expect(bytes, peer, stage), data});
  else
    messages_.receive(data, bytes, peer, stage);
}

void HostTransfers::offer(const std::byte* data, int64_t bytes, int peer, int stage) {
  Offered& offered = offered_.emplace_back();
  offered.peer = peer;
  offered.sent = {identity_, number_, reinterpret_cast<uintptr_t>(data), bytes};
  offered.answered =
      messages_.receive(raw(offered.answer), sizeof(Offer), peer, stage_of_answer(stage));
  messages_.send(raw(offered.sent), sizeof(Offer), peer, stage_of_offer(stage));
}

HostTransfers::Source& HostTransfers::expect(int64_t bytes, int peer, int stage) {
  Source& source = sources_.emplace_back();
  source.peer_ = peer;
  source.stage_ = stage;
  source.bytes_ = bytes;
  source.arriving_ =
      messages_.receive(raw(source.offer_), sizeof(Offer), peer, stage_of_offer(stage));
  return source;
}

void HostTransfers::check(const Offer& found, int64_t bytes, int peer) const {
  if (found.identity == identity_ && found.number == number_ && found.bytes == bytes) return;
  throw PeerError(
      "", peer,
      fmt::format(" offers {} bytes for call {} ({:016x}), expected {} for call {} ({:016x})",
                  found.bytes, found.number, found.identity, bytes, number_, identity_));
}

void HostTransfers::await_offer(Source& source) {
  if (!source.arriving_) return;
  messages_.wait(source.arriving_);
  source.arriving_.reset();
  check(source.offer_, source.bytes_, source.peer_);
}

void HostTransfers::read(Source& source, int64_t begin, int64_t bytes, std::byte* to) {
  await_offer(source);
  messages_.check_not_given_up();
  memory_->read(source.peer_, to, source.offer_.address + static_cast<uint64_t>(begin), bytes);
}

void HostTransfers::release(Source& source) {
  await_offer(source);
  messages_.send(raw(source.offer_), sizeof(Offer), source.peer_, stage_of_answer(source.stage_));
}

void HostTransfers::read_whole(const Reading& reading) {
  const int64_t bytes = reading.source.bytes_;
  for (int64_t at = 0; at < bytes; at += kReadBytes)
    read(reading.source, at, std::min(kReadBytes, bytes - at), reading.to + at);
  release(reading.source);
}

void HostTransfers::finish() {
  for (const Reading& reading : readings_) read_whole(reading);
  for (const Offered& offered : offered_) {
    messages_.wait(offered.answered);
    check(offered.answer, offered.sent.bytes, offered.peer);
  }
  messages_.finish();
}

}  // namespace lockstep
