#include "lockstep/parallel_state/offer_board.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace lockstep {
namespace {

constexpr uint64_t kNumbers = 8;          // calls with spots of their own
constexpr uint64_t kRows = kNumbers + 1;  // the last one is for calls without a number
constexpr int kMessages = 16;             // under way from one rank to another
constexpr uint64_t kSpots = kRows * OfferBoard::kStages + kMessages;
constexpr long kSleepNs = 50'000'000;

void* map(int file, size_t bytes) {
  void* const page = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  return page == MAP_FAILED ? nullptr : page;
}

/// Sleeps while `word` is `value`, but not for long.
void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
  const timespec most = {0, kSleepNs};
  ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &most, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

OfferBoard::OfferBoard(int rank, int size)
    : rank_(rank), size_(size), pages_(static_cast<size_t>(size)) {
  static_assert(std::atomic<uint32_t>::is_always_lock_free);
  if (size > kMostRanks) return;
  constexpr unsigned kNoExecSeal = 8;  // some systems insist on it, older ones do not know it
  for (const unsigned flag : {kNoExecSeal, 0U})
    if (file_ < 0) file_ = ::memfd_create("lockstep-offers", MFD_CLOEXEC | flag);
  // Memory that is missing later would end the process.
  if (file_ >= 0 && ::posix_fallocate(file_, 0, static_cast<off_t>(bytes())) != 0) close_file();
}

OfferBoard::~OfferBoard() {
  close_file();
  for (Head* page : pages_)
    if (page) ::munmap(page, bytes());
}

size_t OfferBoard::bytes() const {
  return sizeof(Head) + static_cast<size_t>(size_) * kSpots * sizeof(Spot);
}

OfferBoard::Place OfferBoard::place() const { return {::getpid(), file_}; }

bool OfferBoard::open(const std::vector<Place>& places) {
  for (size_t owner = 0; owner < pages_.size(); ++owner) {
    const Place& place = places.at(owner);
    if (place.file < 0) return false;
    const std::string path = fmt::format("/proc/{}/fd/{}", place.process, place.file);
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) return false;
    pages_[owner] = static_cast<Head*>(map(file, bytes()));
    ::close(file);
    if (!pages_[owner]) return false;
  }
  return true;
}

void OfferBoard::close_file() {
  if (file_ >= 0) ::close(file_);
  file_ = -1;
}

OfferBoard::Spot& OfferBoard::spot(int owner, int reader, int stage, uint64_t identity,
                                   uint64_t number) const {
  const uint64_t row = identity == 0 ? kNumbers : number % kNumbers;
  return spots(owner, reader)[row * kStages + static_cast<uint64_t>(stage)];
}

OfferBoard::Spot* OfferBoard::spots(int owner, int reader) const {
  Spot* const first = reinterpret_cast<Spot*>(&page(owner) + 1);
  return first + static_cast<size_t>(reader) * kSpots;
}

OfferBoard::Spot& OfferBoard::message_spot(int owner, int reader, int number) const {
  return spots(owner, reader)[kRows * kStages + static_cast<size_t>(number)];
}

template <class Done>
void OfferBoard::wait_until(Spot& spot, const Check& check, Done done) {
  const auto is_done = [&] { return done(spot.state.load(std::memory_order_acquire)); };
  if (look_for_a_while(is_done)) return;
  for (;;) {
    ++spot.sleepers;
    const uint32_t state = spot.state;
    if (!done(state)) sleep_while(spot.state, state);
    --spot.sleepers;
    if (is_done()) return;
    try {
      check();
    } catch (...) {
      if (is_done()) return;  // it was the last thing that the other rank did
      throw;
    }
  }
}

OfferBoard::Ticket OfferBoard::put(int peer, int stage, const Offer& offer, const Check& check) {
  Spot& place = spot(rank_, peer, stage, offer.identity, offer.number);
  for (;;) {
    {
      const std::lock_guard<std::mutex> lock(put_);
      const uint32_t state = place.state.load(std::memory_order_acquire);
      if (state % 2 == 0) {
        place.offer = offer;
        place.state = state + 1;
        if (place.sleepers != 0) wake_all(place.state);
        return state + 1;
      }
    }
    wait_until(place, check, [](uint32_t state) { return state % 2 == 0; });
  }
}

void OfferBoard::wait_taken(int peer, int stage, const Offer& offer, Ticket ticket,
                            const Check& check) {
  wait_until(spot(rank_, peer, stage, offer.identity, offer.number), check,
             [ticket](uint32_t state) { return state != ticket; });
}

OfferBoard::Offer OfferBoard::wait_offered(int peer, int stage, uint64_t identity, uint64_t number,
                                           const Check& check) {
  Spot& place = spot(peer, rank_, stage, identity, number);
  // Another thread of this rank may take an offer of its own meanwhile.
  wait_until(place, check, [&](uint32_t state) {
    if (state % 2 == 0 || place.offer.identity != identity || place.offer.number != number)
      return false;
    std::atomic_thread_fence(std::memory_order_acquire);
    return place.state.load(std::memory_order_relaxed) == state;
  });
  return place.offer;
}

void OfferBoard::take(int peer, int stage, uint64_t identity, uint64_t number) {
  Spot& place = spot(peer, rank_, stage, identity, number);
  ++place.state;
  if (place.sleepers != 0) wake_all(place.state);
}

void OfferBoard::ring(int peer) {
  Head& head = page(peer);
  ++head.bell;
  if (head.sleepers != 0) wake_all(head.bell);
}

void OfferBoard::sleep(uint32_t bell) {
  Head& head = page(rank_);
  ++head.sleepers;
  sleep_while(head.bell, bell);
  --head.sleepers;
}

std::optional<OfferBoard::Posted> OfferBoard::try_post(int peer, const Offer& message) {
  for (int number = 0; number < kMessages; ++number) {
    Spot& place = message_spot(rank_, peer, number);
    const uint32_t state = place.state.load(std::memory_order_acquire);
    if (state % 2 == 1) continue;
    place.offer = message;
    place.state = state + 1;
    ring(peer);
    return Posted{number, state + 1, message.address};
  }
  return std::nullopt;
}

bool OfferBoard::is_taken(int peer, const Posted& posted) const {
  return message_spot(rank_, peer, posted.spot).state.load(std::memory_order_acquire) !=
         posted.ticket;
}

std::optional<OfferBoard::Posted> OfferBoard::find(int peer, const Offer& message) const {
  for (int number = 0; number < kMessages; ++number) {
    const Spot& place = message_spot(peer, rank_, number);
    const uint32_t state = place.state.load(std::memory_order_acquire);
    if (state % 2 == 1 && place.offer.identity == message.identity &&
        place.offer.number == message.number && place.offer.bytes == message.bytes)
      return Posted{number, state, place.offer.address};
  }
  return std::nullopt;
}

void OfferBoard::take(int peer, const Posted& found) {
  ++message_spot(peer, rank_, found.spot).state;
  ring(peer);
}

}  // namespace lockstep
