#pragma once

// Internal.

#include <chrono>
#include <cstddef>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace lockstep {

/// The first byte of a contiguous CPU tensor.
inline std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(tensor.data_ptr());
}

/// Memory where parts arrive that are then added.
using HostScratch = std::vector<std::byte>;

/// The messages of one task of HostExchange. Used by one thread; give_up() may come from another.
class HostMessages {
 public:
  struct Message {
    c10::intrusive_ptr<c10d::Work> work;  ///< null for an empty message
    int peer = 0;

    explicit operator bool() const { return work.defined(); }
    void reset() { work.reset(); }
  };

  /// `identity` and `number` of the call make the tags; `scratch` belongs to the thread.
  HostMessages(c10d::Backend& backend, std::chrono::milliseconds timeout, HostScratch& scratch,
               uint64_t identity, uint64_t number)
      : backend_(backend),
        timeout_(timeout),
        scratch_(scratch),
        identity_(identity),
        number_(number) {}

  /// Whether messages of that call could be mistaken for those of this one: their tags are the
  /// same.
  bool same_tags(uint64_t identity, uint64_t number) const {
    return identity == identity_ && number % kNumbers == number_ % kNumbers;
  }
  uint64_t identity() const { return identity_; }
  uint64_t number() const { return number_; }

  /// Post a message. The memory must live until finish(). Empty messages are not sent.
  Message send(std::byte* data, int64_t bytes, int peer, int stage = 0) {
    return post(true, data, bytes, peer, stage);
  }
  Message receive(std::byte* data, int64_t bytes, int peer, int stage = 0) {
    return post(false, data, bytes, peer, stage);
  }

  /// Returns when the message has been read or written. Throws when that fails, takes longer than
  /// the timeout, or was given up; the error names the peer.
  void wait(const Message& message) const;
  /// Waits for all messages.
  void finish();
  /// Ends all waits, current and later ones.
  void give_up();
  /// Throws once give_up() was called.
  void check_not_given_up();

  /// Scratch memory of at least `bytes` bytes; what was reserved before is gone.
  std::byte* reserve(int64_t bytes);

 private:
  static constexpr uint64_t kNumbers = 32;  ///< calls of one identity with different tags

  Message post(bool is_send, std::byte* data, int64_t bytes, int peer, int stage);

  c10d::Backend& backend_;
  const std::chrono::milliseconds timeout_;
  HostScratch& scratch_;
  const uint64_t identity_, number_;
  std::mutex mutex_;
  std::vector<Message> messages_;
  bool given_up_ = false;
};

}  // namespace lockstep
