#pragma once

// Internal. No libtorch here.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

/// Whether the ranks of one host may read each other's memory: yes, unless the environment variable
/// LOCKSTEP_DIRECT_MEMORY is 0. ConfigError if it is neither 0 nor 1. If one rank says no, its
/// groups do not read directly.
bool direct_memory_wanted();

/// Reads the memory of the other ranks of a group on the same host, with Linux's process_vm_readv.
/// The system must permit it: the ranks belong to one user and one process id namespace, and
/// neither Yama (kernel.yama.ptrace_scope 1 or more) nor a container's system call filter forbids
/// it. Nothing is done to extend what the system permits.
///
/// A rank keeps a secret of 128 random bits in its memory while others may read it. Every read also
/// reads the secret, after the data: if it is still there, the data came from exactly this rank, at
/// a time when it had not withdrawn its memory. Ranks in the same process are read in the same way,
/// because a read of freed memory then fails, whereas a copy would end the process.
class DirectMemory {
 public:
  using Secret = std::array<uint64_t, 2>;

  /// The data that a rank gives the others about itself.
  struct Card {
    uint64_t host = 0;     ///< digest of the host's boot and the namespace; 0: offers nothing
    int64_t process = 0;   ///< its id
    uint64_t address = 0;  ///< of its secret
    Secret secret = {};
  };

  /// Creates its own secret, unless `offers` is false or the system does not identify host and
  /// namespace.
  explicit DirectMemory(bool offers);
  /// Withdraws.
  ~DirectMemory() { withdraw(); }
  DirectMemory(const DirectMemory&) = delete;
  DirectMemory& operator=(const DirectMemory&) = delete;

  Card card() const { return card_; }

  /// Takes the cards of all ranks, this one included. Returns whether all of them offer their
  /// memory from the same host; they see the same cards, so they agree.
  bool meet(std::vector<Card> cards);
  /// Whether the secrets of all ranks can be read from here. Call it after meet().
  bool can_read_all() const noexcept;
  /// CommunicationError that names the rank and the reason if its memory cannot be read any more:
  /// it has ended or given up.
  void check(int peer) const;

  /// Reads `bytes` bytes at `address` in the memory of rank `peer` of the group. CommunicationError
  /// names the rank and the reason.
  void read(int peer, std::byte* to, uint64_t address, int64_t bytes) const;

  /// From now on all reads of this rank's memory fail. Call it before memory that another rank may
  /// still be reading is changed or freed.
  void withdraw() noexcept;

  /// Bytes that this rank has read from the others so far.
  int64_t bytes_read() const { return bytes_read_; }

 private:
  /// Up to 1 GiB: the system reads less than 2 GiB at a time. An errno; 0 if all is well.
  int try_to_read(const Card& card, std::byte* to, uint64_t address, int64_t bytes) const noexcept;

  Card card_;
  std::array<std::atomic<uint64_t>, 2> secret_;
  std::vector<Card> cards_;
  mutable std::atomic<int64_t> bytes_read_ = 0;
};

}  // namespace lockstep
