#pragma once

// Internal. No libtorch here.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

namespace lockstep {

/// Calls done() until it returns true, but only for a short time, giving way to other threads of
/// this core. Waking a thread takes longer than most operations that are waited for.
template <class Done>
bool look_for_a_while(Done done) {
  if (done()) return true;
  constexpr std::chrono::microseconds kLook{200};
  const auto end = std::chrono::steady_clock::now() + kLook;
  do {
    std::this_thread::yield();
    if (done()) return true;
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

/// Where the ranks of a group on one host tell each other which part of their memory they offer.
/// Each rank has a page of shared memory on which it writes its offers; the others write there that
/// they have taken them. A rank that waits looks for a while, then sleeps until it is woken.
///
/// A page has about 2 KiB for each rank. Its part for messages grows with the largest number of
/// them that was under way at a time: by 64 bytes for a message. All ranks map all pages, with 263
/// KB of address space for each pair: 17 MB for 8 ranks, 17 GB for 256. The page's descriptor stays
/// open.
class OfferBoard {
 public:
  /// `number` of a call of that `identity`: which call of the group it is.
  struct Offer {
    uint64_t identity = 0, number = 0, address = 0;
    int64_t bytes = 0;
  };
  /// Where a page is found.
  struct Place {
    int64_t process = 0;
    int64_t file = -1;  ///< descriptor in that process; negative: there is no page
    uint64_t word = 0;  ///< drawn at random; the page begins with it
  };
  /// Called from time to time while a wait lasts; throws to end it.
  using Check = std::function<void()>;
  /// Marks an offer that was put.
  using Ticket = uint32_t;

  static constexpr int kStages = 2;
  /// Calls in a row that have spots of their own.
  static constexpr uint64_t kCalls = 8;
  /// Under way from one rank to another.
  static constexpr int kMostMessages = 4096;
  /// Of the ranks of a group; larger groups have no board.
  static constexpr int kMostRanks = 256;

  /// Makes the page of `rank` in a group of `size` ranks, if the system has the memory.
  OfferBoard(int rank, int size);
  ~OfferBoard();
  OfferBoard(const OfferBoard&) = delete;
  OfferBoard& operator=(const OfferBoard&) = delete;

  Place place() const;
  /// Opens the pages of all ranks, this one included. Returns whether all could be opened. A place
  /// can lead elsewhere, because processes have other numbers in another namespace: nothing is
  /// written to a file that does not begin with the word.
  bool open(const std::vector<Place>& places);

  /// Offers something to `peer`, after it has taken what was offered at the same spot: by the call
  /// kCalls before, at that stage. A call must not come before that one has put its offer.
  Ticket put(int peer, int stage, const Offer& offer, const Check& check);
  /// Returns when `peer` has taken it.
  void wait_taken(int peer, int stage, const Offer& offer, Ticket ticket, const Check& check);
  /// Returns the offer of `peer` for that call when it is there.
  Offer wait_offered(int peer, int stage, uint64_t identity, uint64_t number, const Check& check);
  /// That offer is not used any more.
  void take(int peer, int stage, uint64_t identity, uint64_t number);

  /// A message on the board, in one of the spots that a pair of ranks has for messages.
  struct Posted {
    int spot = 0;
    Ticket ticket = 0;
    uint64_t address = 0;
  };
  /// Offers a message to `peer`; nothing if kMostMessages are offered already or the system has no
  /// memory for another one. Call the functions for messages from one thread at a time.
  std::optional<Posted> try_post(int peer, const Offer& message);
  /// Whether `peer` has taken it.
  bool is_taken(int peer, const Posted& posted) const;
  /// The message of that identity, number and size that `peer` has posted.
  std::optional<Posted> find(int peer, const Offer& message) const;
  void take(int peer, const Posted& found);
  /// A number that changes whenever another rank has posted or taken a message.
  uint32_t bell() const { return page(rank_).bell.load(std::memory_order_acquire); }
  /// Sleeps while the bell has this number, but not for long.
  void sleep(uint32_t bell);

 private:
  /// One offer at a time, from one rank to another.
  struct alignas(64) Spot {
    std::atomic<uint32_t> state;  ///< odd: there is an offer; a higher number each time
    std::atomic<uint32_t> sleepers;
    Offer offer;
  };

  /// The page of a rank: this, a Lane for each reader, and the other spots for messages, which have
  /// memory once they are used.
  struct alignas(64) Head {
    uint64_t word;
    std::atomic<uint32_t> bell;
    std::atomic<uint32_t> sleepers;
  };
  struct Lane;

  void make_page();
  void close_file();
  size_t bytes_at_first() const;
  size_t bytes() const;
  Head& page(int owner) const { return *pages_[static_cast<size_t>(owner)]; }
  Lane& lane(int owner, int reader) const;
  Spot& message_spot(int owner, int reader, int number) const;
  bool has_memory(int peer, int number) const;
  Spot& spot(int owner, int reader, int stage, uint64_t identity, uint64_t number) const;
  void ring(int peer);
  template <class Done>
  static void wait_until(Spot& spot, const Check& check, Done done);

  const int rank_, size_;
  int file_ = -1;  ///< open as long as the page may grow
  uint64_t word_ = 0;
  std::vector<Head*> pages_;  ///< of all ranks
  std::mutex put_;            ///< several threads may put
};

}  // namespace lockstep
