#include "lockstep/parallel_state/host_messages.h"

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/failure_reason.h"
#include "lockstep/parallel_state/message_tag.h"
#include "lockstep/parallel_state/peer_error.h"

namespace lockstep {
namespace {

constexpr int kNumberBits = 5;

}  // namespace

HostMessages::Message HostMessages::post(bool is_send, std::byte* data, int64_t bytes, int peer,
                                         int stage) {
  static_assert(kNumbers == 1 << kNumberBits);
  if (bytes == 0) return {};
  std::vector<at::Tensor> tensors = {at::from_blob(data, {bytes}, at::kByte)};
  const uint64_t hash = mixed_tag(identity_ + static_cast<uint64_t>(stage),
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
  const auto size = static_cast<size_t>(bytes);
  if (scratch_.size() < size) scratch_ = HostScratch(size);
  return scratch_.data();
}

}  // namespace lockstep
