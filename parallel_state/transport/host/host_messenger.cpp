#include "lockstep/parallel_state/host_messenger.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/message_tag.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kPause{1};  // of the messenger's own thread
constexpr std::chrono::milliseconds kBetweenChecks{20};

}  // namespace

/// Guarded by the messenger's mutex, except for `done`.
struct HostMessenger::Message : Pending {
  Message(HostMessenger& messenger, const at::Tensor& data, int other, bool is_send)
      : owner(messenger), tensor(data.detach()), peer(other), sends(is_send) {}

  void wait(const Waiting& waiting) override { owner.wait_for(*this, waiting); }
  void abandon() override {
    const std::lock_guard<std::mutex> lock(owner.mutex_);
    owner.abandon(*this, std::make_exception_ptr(CommunicationError("another part has failed")));
  }
  bool is_completed() const override { return done; }
  void end(std::exception_ptr failure = nullptr) {
    if (failure && sends) owner.reading_.memory.withdraw();
    error = std::move(failure);
    done = true;
  }

  HostMessenger& owner;
  const at::Tensor tensor;
  const int peer;
  const bool sends;
  uint64_t turn = 0;  ///< of a message to send, among those to its peer
  OfferBoard::Offer offer = {};
  std::optional<OfferBoard::Posted> posted = {};  ///< once a message to send is on the board
  std::exception_ptr error = {};
  std::atomic<bool> done = false;
};

HostMessenger::~HostMessenger() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended_ = true;
    // Others could read what is freed now.
    if (std::any_of(under_way_.begin(), under_way_.end(), [](const auto& m) { return m->sends; }))
      reading_.memory.withdraw();
  }
  changed_.notify_all();
  if (worker_.joinable()) worker_.join();
}

std::shared_ptr<Pending> HostMessenger::send(const at::Tensor& tensor, int destination,
                                             uint64_t identity) {
  return post(tensor, destination, identity, true);
}

std::shared_ptr<Pending> HostMessenger::receive(const at::Tensor& tensor, int source,
                                                uint64_t identity) {
  return post(tensor, source, identity, false);
}

std::shared_ptr<Pending> HostMessenger::post(const at::Tensor& tensor, int peer, uint64_t identity,
                                             bool sends) {
  auto message = std::make_shared<Message>(*this, tensor, peer, sends);
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  const uint64_t kind = mixed_tag(identity, static_cast<uint64_t>(bytes), 64);
  const std::lock_guard<std::mutex> lock(mutex_);
  // It may fail, so it comes before the offer.
  if (bytes > 0 && !worker_.joinable()) worker_ = std::thread([this] { work(); });
  message->offer = {kind, next_[{peer, sends, kind}]++,
                    reinterpret_cast<uintptr_t>(tensor.const_data_ptr()), bytes};
  if (bytes == 0) message->end();
  if (message->done) return message;
  if (sends) message->turn = turns_[peer].given++;
  under_way_.push_back(message);
  if (advance(*message))
    under_way_.pop_back();
  else if (under_way_.size() == 1)
    changed_.notify_one();
  return message;
}

void HostMessenger::post_in_turn(Message& message) {
  Turns& turns = turns_[message.peer];
  if (message.turn != turns.posted) return;
  message.posted = reading_.board.try_post(message.peer, message.offer);
  if (message.posted) ++turns.posted;
}

bool HostMessenger::advance(Message& message) {
  const OfferBoard::Offer& offer = message.offer;
  try {
    if (message.sends) {
      if (!message.posted) post_in_turn(message);
      if (!message.posted || !reading_.board.is_taken(message.peer, *message.posted)) return false;
    } else {
      const auto found = reading_.board.find(message.peer, offer);
      if (!found) return false;
      reading_.memory.read(message.peer, static_cast<std::byte*>(message.tensor.data_ptr()),
                           found->address, offer.bytes);
      reading_.board.take(message.peer, *found);
    }
    message.end();
  } catch (const std::exception&) {
    message.end(std::current_exception());
  }
  return true;
}

void HostMessenger::advance() {
  std::erase_if(under_way_, [this](const auto& message) { return advance(*message); });
}

void HostMessenger::check_peers() {
  std::erase_if(under_way_, [this](const auto& message) {
    try {
      reading_.memory.check(message->peer);
      return false;
    } catch (const std::exception&) {
      // What it did before it ended counts.
      if (!advance(*message)) message->end(std::current_exception());
      return true;
    }
  });
}

void HostMessenger::abandon(Message& message, std::exception_ptr error) {
  if (message.done) return;
  message.end(std::move(error));
  std::erase_if(under_way_, [&](const auto& one) { return one.get() == &message; });
}

void HostMessenger::wait_for(Message& message, const Waiting& waiting) {
  std::unique_lock<std::mutex> lock(mutex_);
  ++waiting_;
  try {
    wait_for(message, {waiting.failures, Clock::now(), waiting.timeout}, lock);
  } catch (...) {
    --waiting_;
    abandon(message, std::current_exception());
    throw;
  }
  --waiting_;
  if (message.error) std::rethrow_exception(message.error);
}

void HostMessenger::wait_for(const Message& message, const Waiting& waiting,
                             std::unique_lock<std::mutex>& lock) {
  auto next_check = Clock::now() + kBetweenChecks;
  for (;;) {
    const uint32_t bell = reading_.board.bell();
    advance();
    if (message.done) return;
    lock.unlock();
    if (!look_for_a_while([&] { return message.done || reading_.board.bell() != bell; }))
      reading_.board.sleep(bell);
    lock.lock();
    if (message.done || Clock::now() < next_check) continue;
    next_check = Clock::now() + kBetweenChecks;
    check_peers();
    if (message.done) return;
    check_wait(waiting);
  }
}

void HostMessenger::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!ended_) {
    changed_.wait(lock, [this] { return ended_ || !under_way_.empty(); });
    if (waiting_ == 0) advance();
    if (!under_way_.empty()) changed_.wait_for(lock, kPause, [this] { return ended_; });
  }
}

}  // namespace lockstep
