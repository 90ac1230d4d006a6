#include "lockstep/parallel_state/offer_board.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>
#include <random>

namespace lockstep {
namespace {

constexpr uint64_t kRows = OfferBoard::kCalls + 1;  // the last one is for calls without a number
constexpr int kFirstMessages = 16;                  // whose spots have memory from the beginning
constexpr int kLaterMessages = OfferBoard::kMostMessages - kFirstMessages;
constexpr long kSleepNs = 50'000'000;

/// Gives that part of the file memory: if it were missing later, that would end the process.
bool give_memory(int file, size_t begin, size_t bytes) {
  int error = EINTR;
  while (error == EINTR)
    error = ::posix_fallocate(file, static_cast<off_t>(begin), static_cast<off_t>(bytes));
  return error == 0;
}

bool is_page(int file, uint64_t word, size_t bytes) {
  struct stat status = {};
  if (::fstat(file, &status) != 0 || !S_ISREG(status.st_mode) ||
      static_cast<size_t>(status.st_size) < bytes)
    return false;
  void* const begin = ::mmap(nullptr, sizeof word, PROT_READ, MAP_SHARED, file, 0);
  if (begin == MAP_FAILED) return false;
  const bool same = *static_cast<const uint64_t*>(begin) == word;
  ::munmap(begin, sizeof word);
  return same;
}

void* map_page(const OfferBoard::Place& place, size_t bytes) {
  if (place.file < 0) return nullptr;
  const std::string path = fmt::format("/proc/{}/fd/{}", place.process, place.file);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (file < 0) return nullptr;
  void* const page = is_page(file, place.word, bytes)
                         ? ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)
                         : MAP_FAILED;
  ::close(file);
  if (page == MAP_FAILED) return nullptr;
  ::madvise(page, bytes, MADV_DONTDUMP);  // a core dump would give all of it memory
  return page;
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

/// From one rank to one reader.
struct OfferBoard::Lane {
  Spot calls[kRows * kStages];
  Spot messages[kFirstMessages];
  alignas(64) std::atomic<uint32_t> used;  ///< spots for messages, up to the last one with one
};

OfferBoard::OfferBoard(int rank, int size)
    : rank_(rank), size_(size), pages_(static_cast<size_t>(size)) {
  static_assert(std::atomic<uint32_t>::is_always_lock_free);
  if (size <= kMostRanks) make_page();
}

void OfferBoard::make_page() {
  rlimit most = {};  // the system ends a process that makes a larger file
  if (::getrlimit(RLIMIT_FSIZE, &most) != 0 || most.rlim_cur < bytes()) return;
  constexpr unsigned kNoExecSeal = 8;  // some systems insist on it, older ones do not know it
  for (const unsigned flag : {kNoExecSeal, 0U})
    if (file_ < 0) file_ = ::memfd_create("lockstep-offers", MFD_CLOEXEC | flag);
  if (file_ < 0) return;
  std::random_device random;
  word_ = uint64_t{random()} << 32 | random();
  if (!give_memory(file_, 0, bytes_at_first()) ||
      ::ftruncate(file_, static_cast<off_t>(bytes())) != 0 ||
      ::pwrite(file_, &word_, sizeof word_, 0) != sizeof word_)
    close_file();
}

OfferBoard::~OfferBoard() {
  close_file();
  for (Head* page : pages_)
    if (page) ::munmap(page, bytes());
}

size_t OfferBoard::bytes_at_first() const {
  return sizeof(Head) + static_cast<size_t>(size_) * sizeof(Lane);
}

size_t OfferBoard::bytes() const {
  return bytes_at_first() + static_cast<size_t>(size_) * kLaterMessages * sizeof(Spot);
}

OfferBoard::Place OfferBoard::place() const { return {::getpid(), file_, word_}; }

bool OfferBoard::open(const std::vector<Place>& places) {
  for (size_t owner = 0; owner < pages_.size(); ++owner) {
    pages_[owner] = static_cast<Head*>(map_page(places.at(owner), bytes()));
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
  const uint64_t row = identity == 0 ? kCalls : number % kCalls;
  return lane(owner, reader).calls[row * kStages + static_cast<uint64_t>(stage)];
}

OfferBoard::Lane& OfferBoard::lane(int owner, int reader) const {
  return reinterpret_cast<Lane*>(&page(owner) + 1)[reader];
}

OfferBoard::Spot& OfferBoard::message_spot(int owner, int reader, int number) const {
  if (number < kFirstMessages) return lane(owner, reader).messages[number];
  Spot* const later = reinterpret_cast<Spot*>(&lane(owner, size_));
  return later[reader * kLaterMessages + number - kFirstMessages];
}

bool OfferBoard::has_memory(int peer, int number) const {
  if (number < kFirstMessages) return true;
  const auto begin = reinterpret_cast<std::byte*>(&message_spot(rank_, peer, number)) -
                     reinterpret_cast<std::byte*>(&page(rank_));
  return number < kMostMessages && give_memory(file_, static_cast<size_t>(begin), sizeof(Spot));
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
  std::atomic<uint32_t>& used = lane(rank_, peer).used;
  auto end = static_cast<int>(used.load(std::memory_order_relaxed));
  const auto is_in_use = [&](int number) {
    return message_spot(rank_, peer, number).state.load(std::memory_order_acquire) % 2 == 1;
  };
  while (end > 0 && !is_in_use(end - 1)) --end;
  int number = 0;
  while (number < end && is_in_use(number)) ++number;
  if (number == end && !has_memory(peer, number)) return std::nullopt;
  Spot& place = message_spot(rank_, peer, number);
  const uint32_t ticket = place.state.load(std::memory_order_relaxed) + 1;
  place.offer = message;
  place.state = ticket;
  used.store(static_cast<uint32_t>(std::max(end, number + 1)), std::memory_order_release);
  ring(peer);
  return Posted{number, ticket, message.address};
}

bool OfferBoard::is_taken(int peer, const Posted& posted) const {
  return message_spot(rank_, peer, posted.spot).state.load(std::memory_order_acquire) !=
         posted.ticket;
}

std::optional<OfferBoard::Posted> OfferBoard::find(int peer, const Offer& message) const {
  const auto end = static_cast<int>(lane(peer, rank_).used.load(std::memory_order_acquire));
  for (int number = 0; number < end; ++number) {
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
