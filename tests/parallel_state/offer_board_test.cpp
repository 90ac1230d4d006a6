#include "lockstep/parallel_state/offer_board.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <future>
#include <optional>
#include <stdexcept>
#include <string>

namespace lockstep {
namespace {

using std::chrono::milliseconds;

constexpr uint64_t kCall = 7, kOther = 8;  // identities

const OfferBoard::Check kPatient = [] {};

/// Both ends of a group of two ranks in this process.
struct Boards {
  Boards() {
    for (OfferBoard* board : {&zero, &one})
      if (!board->open({zero.place(), one.place()})) throw std::runtime_error("not opened");
  }

  OfferBoard zero{0, 2}, one{1, 2};
};

bool is_waiting(std::future<void>& future) {
  return future.wait_for(milliseconds(100)) == std::future_status::timeout;
}

TEST(OfferBoard, WhatIsOfferedIsFoundAndTaken) {
  Boards boards;
  for (uint64_t number = 0; number < 100; ++number) {
    const OfferBoard::Offer offer = {kCall, number, 1000 + number, 4};
    const auto ticket = boards.zero.put(1, 1, offer, kPatient);
    const OfferBoard::Offer found = boards.one.wait_offered(0, 1, kCall, number, kPatient);
    EXPECT_EQ(found.address, 1000 + number);
    EXPECT_EQ(found.bytes, 4);
    boards.one.take(0, 1, kCall, number);
    boards.zero.wait_taken(1, 1, offer, ticket, kPatient);
  }
}

TEST(OfferBoard, ItsPagesAreNotDumped) {
  const Boards boards;
  std::ifstream maps("/proc/self/smaps");
  int found = 0;
  bool is_page = false;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("lockstep-offers") != std::string::npos) is_page = true;
    if (line.rfind("VmFlags:", 0) != 0) continue;
    if (is_page) EXPECT_NE((line + " ").find(" dd "), std::string::npos) << line;
    found += is_page ? 1 : 0;
    is_page = false;
  }
  EXPECT_EQ(found, 4);
}

TEST(OfferBoard, HasNoPageWhereFilesMayNotBeSoLarge) {
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small = {1 << 16, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  OfferBoard board(0, 2);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_LT(board.place().file, 0);
  EXPECT_FALSE(board.open({board.place(), board.place()}));
}

TEST(OfferBoard, ASleepingRankIsWoken) {
  Boards boards;
  const OfferBoard::Offer offer = {kCall, 3, 1, 1};
  auto found =
      std::async(std::launch::async, [&] { boards.one.wait_offered(0, 0, kCall, 3, kPatient); });
  EXPECT_TRUE(is_waiting(found));
  const auto ticket = boards.zero.put(1, 0, offer, kPatient);
  found.get();
  auto taken = std::async(std::launch::async,
                          [&] { boards.zero.wait_taken(1, 0, offer, ticket, kPatient); });
  EXPECT_TRUE(is_waiting(taken));
  boards.one.take(0, 0, kCall, 3);
  taken.get();
}

TEST(OfferBoard, AnOfferOfAnotherCallOrStageOrToAnotherRankIsNotFound) {
  OfferBoard zero(0, 3), one(1, 3), two(2, 3);
  for (OfferBoard* board : {&zero, &one, &two})
    ASSERT_TRUE(board->open({zero.place(), one.place(), two.place()}));
  auto found = std::async(std::launch::async, [&] { one.wait_offered(0, 1, kCall, 5, kPatient); });
  zero.put(1, 1, {kOther, 5, 1, 1}, kPatient);  // the same spot
  zero.put(1, 0, {kCall, 5, 1, 1}, kPatient);
  zero.put(2, 1, {kCall, 5, 1, 1}, kPatient);
  two.put(1, 1, {kCall, 5, 1, 1}, kPatient);
  EXPECT_TRUE(is_waiting(found));
  one.take(0, 1, kOther, 5);
  zero.put(1, 1, {kCall, 5, 1, 1}, kPatient);
  found.get();
}

TEST(OfferBoard, ASpotIsUsedAgainAfterItsOfferWasTaken) {
  Boards boards;
  const OfferBoard::Offer first = {kCall, 1, 1, 1}, later = {kCall, 9, 2, 1};
  const auto ticket = boards.zero.put(1, 0, first, kPatient);
  auto second = std::async(std::launch::async, [&] { boards.zero.put(1, 0, later, kPatient); });
  EXPECT_TRUE(is_waiting(second));
  EXPECT_EQ(boards.one.wait_offered(0, 0, kCall, 1, kPatient).address, 1);
  boards.one.take(0, 0, kCall, 1);
  second.get();
  boards.zero.wait_taken(1, 0, first, ticket, kPatient);  // not the later one
  EXPECT_EQ(boards.one.wait_offered(0, 0, kCall, 9, kPatient).address, 2);
}

TEST(OfferBoard, CallsWithoutANumberHaveASpotOfTheirOwn) {
  Boards boards;
  boards.zero.put(1, 0, {kCall, 0, 1, 1}, kPatient);
  boards.zero.put(1, 0, {0, 0, 2, 1}, kPatient);
  EXPECT_EQ(boards.one.wait_offered(0, 0, 0, 0, kPatient).address, 2);
  EXPECT_EQ(boards.one.wait_offered(0, 0, kCall, 0, kPatient).address, 1);
}

TEST(OfferBoard, ACheckEndsEveryWait) {
  Boards boards;
  const auto impatient = [] { throw std::runtime_error("enough"); };
  const OfferBoard::Offer offer = {kCall, 1, 1, 1};
  EXPECT_THROW(boards.one.wait_offered(0, 0, kCall, 1, impatient), std::runtime_error);
  const auto ticket = boards.zero.put(1, 0, offer, impatient);
  EXPECT_THROW(boards.zero.put(1, 0, offer, impatient), std::runtime_error);
  EXPECT_THROW(boards.zero.wait_taken(1, 0, offer, ticket, impatient), std::runtime_error);
}

TEST(OfferBoard, WhatARankDidBeforeItEndedCounts) {
  Boards boards;
  const auto gone_after = [&](uint64_t number) {
    boards.zero.put(1, 0, {kCall, number, 1, 1}, kPatient);
    throw std::runtime_error("the rank has ended");
  };
  EXPECT_NO_THROW(boards.one.wait_offered(0, 0, kCall, 9, [&] { gone_after(9); }));
}

TEST(OfferBoard, AnotherProcessAnswersManyTimes) {
  int pipe[2] = {};
  ASSERT_EQ(::pipe(pipe), 0);
  OfferBoard here(0, 2);
  const OfferBoard::Place place = here.place();
  const pid_t child = ::fork();
  if (child == 0) {
    OfferBoard there(1, 2);
    const OfferBoard::Place own = there.place();
    if (::write(pipe[1], &own, sizeof own) != sizeof own || !there.open({place, own})) ::_exit(1);
    for (uint64_t number = 0; number < 2000; ++number) {
      const OfferBoard::Offer found = there.wait_offered(0, 0, kCall, number, kPatient);
      there.take(0, 0, kCall, number);
      there.put(0, 1, {kCall, number, found.address + 1, 1}, kPatient);
    }
    for (;;) ::pause();
  }
  OfferBoard::Place other;
  ASSERT_EQ(::read(pipe[0], &other, sizeof other), static_cast<ssize_t>(sizeof other));
  ASSERT_TRUE(here.open({place, other}));
  for (uint64_t number = 0; number < 2000; ++number) {
    here.put(1, 0, {kCall, number, number, 1}, kPatient);
    EXPECT_EQ(here.wait_offered(1, 1, kCall, number, kPatient).address, number + 1);
    here.take(1, 1, kCall, number);
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  for (const int end : pipe) ::close(end);
}

TEST(OfferBoard, APageThatCannotBeOpenedIsNoCrash) {
  OfferBoard zero(0, 2);
  std::optional<OfferBoard> one(std::in_place, 1, 2);
  const OfferBoard::Place gone = one->place();
  one.reset();
  EXPECT_FALSE(zero.open({zero.place(), gone}));
  EXPECT_FALSE(zero.open({zero.place(), {}}));
}

TEST(OfferBoard, AFileThatIsNoPageStaysAsItIs) {
  OfferBoard zero(0, 2), one(1, 2), alone(0, 1);
  std::FILE* const file = std::tmpfile();
  ASSERT_NE(file, nullptr);
  const std::string text(1 << 21, 'x');  // larger than a page of two ranks
  ASSERT_EQ(std::fwrite(text.data(), 1, text.size(), file), text.size());
  ASSERT_EQ(std::fflush(file), 0);
  OfferBoard::Place elsewhere = one.place();
  elsewhere.file = ::fileno(file);
  EXPECT_FALSE(zero.open({zero.place(), elsewhere}));
  std::string found(text.size(), ' ');
  EXPECT_EQ(::pread(::fileno(file), found.data(), found.size(), 0),
            static_cast<ssize_t>(found.size()));
  EXPECT_EQ(found, text);
  std::fclose(file);
  OfferBoard::Place other_word = one.place();
  ++other_word.word;
  EXPECT_FALSE(zero.open({zero.place(), other_word}));
  EXPECT_FALSE(zero.open({zero.place(), alone.place()}));  // too small
  EXPECT_TRUE(zero.open({zero.place(), one.place()}));
}

TEST(OfferBoard, ManyMessagesToSeveralRanksAreFoundInAnyOrder) {
  constexpr uint64_t kMost = OfferBoard::kMostMessages;
  OfferBoard zero(0, 3), one(1, 3), two(2, 3);
  for (OfferBoard* board : {&zero, &one, &two})
    ASSERT_TRUE(board->open({zero.place(), one.place(), two.place()}));
  for (uint64_t number = 0; number < kMost; ++number)
    for (const int peer : {0, 2}) {
      const uint64_t address = 10 * number + static_cast<uint64_t>(peer);
      ASSERT_TRUE(one.try_post(peer, {kCall, number, address, 1}));
    }
  for (const int peer : {0, 2}) {
    const OfferBoard::Offer later = {kCall, kMost, 1, 1};
    OfferBoard& reader = peer == 0 ? zero : two;
    EXPECT_FALSE(one.try_post(peer, later));
    for (uint64_t number = kMost; number-- > 0;) {
      const auto found = reader.find(1, {kCall, number, 0, 1});
      ASSERT_TRUE(found);
      ASSERT_EQ(found->address, 10 * number + static_cast<uint64_t>(peer));
      reader.take(1, *found);
    }
    EXPECT_TRUE(one.try_post(peer, later));
  }
}

TEST(OfferBoard, ALargeGroupHasNone) {
  EXPECT_GE(OfferBoard(0, OfferBoard::kMostRanks).place().file, 0);
  EXPECT_LT(OfferBoard(0, OfferBoard::kMostRanks + 1).place().file, 0);
}

}  // namespace
}  // namespace lockstep
