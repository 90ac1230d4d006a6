#include "lockstep/parallel_state/direct_memory.h"

#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <random>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/cpu_traits.h"
#include "lockstep/parallel_state/peer_error.h"
#include "lockstep/parallel_state/process_mark.h"

namespace lockstep {
namespace {

constexpr char kVariable[] = "LOCKSTEP_DIRECT_MEMORY";
constexpr int64_t kMostBytes = 1 << 26;  // of one read

DirectMemory::Secret draw_secret() {
  std::random_device random;
  const auto word = [&] { return uint64_t{random()} << 32 | random(); };
  return {word(), word()};
}

uint64_t address_of(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

}  // namespace

bool direct_memory_wanted() {
  const char* const value = std::getenv(kVariable);
  const std::string text = value ? value : "1";
  require<ConfigError>(text == "0" || text == "1",
                       "environment variable {}: found '{}', allowed: 0 or 1", kVariable, text);
  return text == "1";
}

std::string direct_memory_obstacle() {
  if (!direct_memory_wanted()) return fmt::format("{} is 0", kVariable);
  if (process_namespace() == 0) return "the system does not identify this host";
  const uint64_t there = 1;
  const pid_t parent = ::getpid(), child = ::fork();
  if (child == 0) {
    uint64_t here = 0;
    const iovec to = {&here, sizeof here}, from = {const_cast<uint64_t*>(&there), sizeof there};
    const bool read = ::process_vm_readv(parent, &to, 1, &from, 1, /*flags=*/0) == sizeof here;
    ::_exit(read ? 0 : errno);
  }
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child) return std::strerror(errno);
  if (WIFSIGNALED(status)) return "the system kills any process that tries";
  return WEXITSTATUS(status) == 0 ? "" : std::strerror(WEXITSTATUS(status));
}

DirectMemory::DirectMemory(bool offers) {
  card_.host = offers ? process_namespace() : 0;
  if (card_.host == 0) return;
  card_.process = ::getpid();
  card_.secret = draw_secret();
  card_.address = address_of(secret_.data());
  for (size_t i = 0; i < secret_.size(); ++i) secret_[i] = card_.secret[i];
}

bool DirectMemory::meet(std::vector<Card> cards) {
  cards_ = std::move(cards);
  return std::all_of(cards_.begin(), cards_.end(), [this](const Card& card) {
    return card.host != 0 && card.host == cards_[0].host;
  });
}

bool DirectMemory::can_read_all() const noexcept {
  return std::all_of(cards_.begin(), cards_.end(), [this](const Card& card) {
    return try_to_read(card, nullptr, card.address, 0) == 0;
  });
}

int DirectMemory::try_to_read(const Card& card, std::byte* to, uint64_t address,
                              int64_t bytes) const noexcept {
  Secret secret = {};
  const auto length = static_cast<size_t>(bytes);
  const iovec here[] = {{to, length}, {secret.data(), sizeof secret}};
  const iovec there[] = {{reinterpret_cast<void*>(address), length},
                         {reinterpret_cast<void*>(card.address), sizeof secret}};
  const ssize_t got =
      ::process_vm_readv(static_cast<pid_t>(card.process), here, 2, there, 2, /*flags=*/0);
  if (got < 0) return errno;
  if (got != static_cast<ssize_t>(length + sizeof secret)) return EFAULT;
  return secret == card.secret ? 0 : EKEYREVOKED;
}

void DirectMemory::check(int peer) const {
  const Card& card = cards_.at(static_cast<size_t>(peer));
  const int error = try_to_read(card, nullptr, card.address, 0);
  if (error == 0) return;
  const std::string what = error == EKEYREVOKED ? "has given up"
                           : error == ESRCH
                               ? "has ended"
                               : fmt::format("cannot be read: {}", std::strerror(error));
  throw PeerError("", peer, fmt::format(" (process {}) {}", card.process, what));
}

void DirectMemory::read(int peer, std::byte* to, uint64_t address, int64_t bytes) const {
  const Card& card = cards_.at(static_cast<size_t>(peer));
  int error = 0;
  for (int64_t at = 0; at < bytes && error == 0; at += kMostBytes)
    error = try_to_read(card, to + at, address + static_cast<uint64_t>(at),
                        std::min(kMostBytes, bytes - at));
  if (error != 0)
    throw PeerError(
        fmt::format("{} bytes of the memory of ", bytes), peer,
        fmt::format(" (process {}) cannot be read: {}", card.process,
                    error == EKEYREVOKED ? "the rank has given up" : std::strerror(error)));
  bytes_read_ += bytes;
}

void DirectMemory::withdraw() noexcept {
  for (auto& word : secret_) word = 0;
  std::atomic_thread_fence(std::memory_order_seq_cst);  // what the caller writes now comes later
}

}  // namespace lockstep
