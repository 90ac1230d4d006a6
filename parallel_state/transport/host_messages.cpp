#include "lockstep/parallel_state/host_messages.h"

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/failure_reason.h"
#include "lockstep/parallel_state/peer_error.h"

namespace lockstep {
namespace {

constexpr int kTagBits = 28;  ///< this bit tells the tags of HostExchange from the others
constexpr int kNumberBits = 5;

/// A hash of `bits` bits.
uint64_t mixed(uint64_t identity, uint64_t bytes, int bits) {
  uint64_t hash = (identity ^ bytes * 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
  hash = (hash ^ hash >> 29) * 0x94D049BB133111EBu;
  return hash >> (64 - bits);
}

}  // namespace

int message_tag(uint64_t identity, int64_t bytes) {
  return static_cast<int>(mixed(identity, static_cast<uint64_t>(bytes), kTagBits));
}

HostMessages::Message HostMessages::post(bool is_send, std::byte* data, int64_t bytes, int peer,
                                         int stage) {
  static_assert(kNumbers == 1 << kNumberBits);
  if (bytes == 0) return {};
  std::vector<at::Tensor> tensors = {at::from_blob(data, {bytes}, at::kByte)};
  const uint64_t hash = mixed(identity_ + static_cast<uint64_t>(stage),
                              static_cast<uint64_t>(bytes), kTagBits - kNumberBits);
  const int tag =
      static_cast<int>(uint64_t{1} << kTagBits | hash << kNumberBits | number_ % kNumbers);
  const std::lock_guard<std::mutex> lock(mutex_);
  require<CommunicationError>(!given_up_, "given up");
  messages_.push_back(
      {is_send ? backend_.send(tensors, peer, tag) : backend_.recv(tensors, peer, tag), peer});
  return messages_.back();
}

void HostMessages::wait(const Message& message) const {
  if (!message || message.work->isCompleted()) return;
  bool done = false;
  try {
    done = message.work->wait(timeout_);
  } catch (const std::exception& error) {
    throw PeerError("", message.peer, ": " + reason_of(error));
  }
  require<CommunicationError>(done, "given up");
}

void HostMessages::finish() {
  for (const Message& message : messages_) wait(message);
}

void HostMessages::give_up() {
  const std::lock_guard<std::mutex> lock(mutex_);
  given_up_ = true;
  for (const Message& message : messages_)
    if (!message.work->isCompleted()) message.work->abort();
}

void HostMessages::check_not_given_up() {
  const std::lock_guard<std::mutex> lock(mutex_);
  require<CommunicationError>(!given_up_, "given up");
}

std::byte* HostMessages::reserve(int64_t bytes) {
  if (!scratch_.defined() || scratch_.numel() < bytes) scratch_ = at::empty({bytes}, at::kByte);
  return bytes_of(scratch_);
}

}  // namespace lockstep
