#include "lockstep/parallel_state/direct_memory.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

constexpr size_t kNumbers = 100'000;
constexpr auto kBytes = static_cast<int64_t>(kNumbers * sizeof(int));

/// The contents of a neighbour's memory.
std::vector<int> numbers_of_neighbour() {
  std::vector<int> numbers(kNumbers);
  for (size_t i = 0; i < kNumbers; ++i) numbers[i] = static_cast<int>(i) + 7;
  return numbers;
}

uint64_t place_of(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

/// A process that offers its memory until end().
class Neighbour {
 public:
  /// In the new process, `prepare` runs before the card is handed over.
  explicit Neighbour(const std::function<void(DirectMemory&)>& prepare = [](DirectMemory&) {}) {
    int pipe[2] = {};
    if (::pipe(pipe) != 0) throw std::runtime_error("pipe");
    process_ = ::fork();
    if (process_ == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      DirectMemory memory(/*offers=*/true);
      const std::vector<int> numbers = numbers_of_neighbour();
      prepare(memory);
      const Told told{memory.card(), place_of(numbers.data())};
      if (::write(pipe[1], &told, sizeof told) == sizeof told)
        for (;;) ::pause();
      ::_exit(1);
    }
    const bool good = ::read(pipe[0], &told_, sizeof told_) == sizeof told_;
    for (const int end : pipe) ::close(end);
    if (!good) throw std::runtime_error("the neighbour told nothing");
  }
  ~Neighbour() { end(); }
  Neighbour(const Neighbour&) = delete;
  Neighbour& operator=(const Neighbour&) = delete;

  void end() {
    if (process_ == 0) return;
    ::kill(process_, SIGKILL);
    ::waitpid(std::exchange(process_, 0), nullptr, 0);
  }
  const DirectMemory::Card& card() const { return told_.card; }
  uint64_t numbers() const { return told_.numbers; }

 private:
  struct Told {
    DirectMemory::Card card;
    uint64_t numbers;
  };
  Told told_ = {};
  pid_t process_ = 0;
};

std::vector<int> read_numbers(const DirectMemory& memory, uint64_t address) {
  std::vector<int> numbers(kNumbers);
  memory.read(1, reinterpret_cast<std::byte*>(numbers.data()), address, kBytes);
  return numbers;
}

bool meet(DirectMemory& memory, const DirectMemory::Card& other) {
  return memory.meet({memory.card(), other});
}

TEST(DirectMemory, AnotherProcessIsRead) {
  const Neighbour neighbour;
  DirectMemory memory(/*offers=*/true);
  ASSERT_TRUE(meet(memory, neighbour.card()));
  EXPECT_TRUE(memory.can_read_all());
  EXPECT_EQ(read_numbers(memory, neighbour.numbers()), numbers_of_neighbour());
  EXPECT_NO_THROW(memory.check(1));
  EXPECT_EQ(memory.bytes_read(), kBytes);
}

TEST(DirectMemory, AProcessThatHasEndedIsNamed) {
  Neighbour neighbour;
  DirectMemory memory(/*offers=*/true);
  ASSERT_TRUE(meet(memory, neighbour.card()));
  neighbour.end();
  EXPECT_FALSE(memory.can_read_all());
  EXPECT_TRUE(throws_with<CommunicationError>(
      [&] { read_numbers(memory, neighbour.numbers()); },
      "400000 bytes of the memory of rank 1 of the group (process " +
          std::to_string(neighbour.card().process) + ") cannot be read: No such process"));
  EXPECT_TRUE(throws_with<CommunicationError>(
      [&] { memory.check(1); },
      "rank 1 of the group (process " + std::to_string(neighbour.card().process) + ") has ended"));
}

TEST(DirectMemory, WhatIsWithdrawnIsNotTaken) {
  const Neighbour neighbour([](DirectMemory& memory) { memory.withdraw(); });
  DirectMemory memory(/*offers=*/true);
  ASSERT_TRUE(meet(memory, neighbour.card()));
  EXPECT_FALSE(memory.can_read_all());
  EXPECT_TRUE(throws_with<CommunicationError>([&] { read_numbers(memory, neighbour.numbers()); },
                                              "the rank has given up"));
  EXPECT_EQ(memory.bytes_read(), 0);
  EXPECT_TRUE(throws_with<CommunicationError>([&] { memory.check(1); }, "has given up"));
}

TEST(DirectMemory, AnotherProcessOfTheSameNumberIsNotTaken) {
  const Neighbour neighbour;
  DirectMemory memory(/*offers=*/true);
  DirectMemory::Card card = neighbour.card();
  card.secret[1] ^= 1;
  ASSERT_TRUE(meet(memory, card));
  EXPECT_FALSE(memory.can_read_all());
}

TEST(DirectMemory, MemoryThatIsGoneIsNoCrash) {
  DirectMemory memory(/*offers=*/true);
  ASSERT_TRUE(meet(memory, memory.card()));  // two ranks in one process
  EXPECT_TRUE(memory.can_read_all());
  void* const gone =
      ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  EXPECT_EQ(read_numbers(memory, place_of(gone)), std::vector<int>(kNumbers));
  ::munmap(static_cast<std::byte*>(gone) + kBytes / 2 / 4096 * 4096, kBytes / 2);
  EXPECT_TRUE(throws_with<CommunicationError>([&] { read_numbers(memory, place_of(gone)); },
                                              "Bad address"));
  ::munmap(gone, kBytes / 2 / 4096 * 4096);
}

TEST(DirectMemory, MoreThanTheSystemReadsAtATime) {
  constexpr size_t kHuge = (size_t{1} << 31) + 1, kWindow = 1 << 21;
  constexpr int kReserve = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  DirectMemory memory(/*offers=*/true);
  ASSERT_TRUE(meet(memory, memory.card()));
  void* const from = ::mmap(nullptr, kHuge, PROT_READ | PROT_WRITE, kReserve, -1, 0);
  void* const to = ::mmap(nullptr, kHuge + kWindow, PROT_NONE, kReserve, -1, 0);
  ASSERT_TRUE(from != MAP_FAILED && to != MAP_FAILED);
  std::byte* const last = static_cast<std::byte*>(from) + kHuge - 1;
  *last = std::byte{7};
  // The same memory again and again, so that little of it is needed.
  const int file = ::memfd_create("window", MFD_CLOEXEC);
  ASSERT_EQ(::ftruncate(file, kWindow), 0);
  for (size_t at = 0; at < kHuge; at += kWindow)
    ASSERT_NE(::mmap(static_cast<std::byte*>(to) + at, kWindow, PROT_READ | PROT_WRITE,
                     MAP_SHARED | MAP_FIXED, file, 0),
              MAP_FAILED);
  memory.read(1, static_cast<std::byte*>(to), place_of(from), kHuge);
  EXPECT_EQ(static_cast<std::byte*>(to)[kHuge - 1], std::byte{7});
  EXPECT_EQ(memory.bytes_read(), static_cast<int64_t>(kHuge));
  ::munmap(from, kHuge);
  ::munmap(to, kHuge + kWindow);
  ::close(file);
}

TEST(DirectMemory, AllMustOfferItOnOneHost) {
  DirectMemory memory(/*offers=*/true), silent(/*offers=*/false);
  EXPECT_FALSE(meet(memory, silent.card()));
  EXPECT_FALSE(meet(silent, memory.card()));
  EXPECT_FALSE(meet(silent, silent.card()));
  DirectMemory::Card elsewhere = memory.card();
  ++elsewhere.host;
  EXPECT_FALSE(meet(memory, elsewhere));
}

TEST(DirectMemory, TheEnvironmentSwitchesItOff) {
  constexpr char kName[] = "LOCKSTEP_DIRECT_MEMORY";
  const char* const before = std::getenv(kName);
  const std::string kept = before ? before : "1";
  ::unsetenv(kName);
  EXPECT_TRUE(direct_memory_wanted());
  ::setenv(kName, "1", 1);
  EXPECT_TRUE(direct_memory_wanted());
  ::setenv(kName, "0", 1);
  EXPECT_FALSE(direct_memory_wanted());
  ::setenv(kName, "off", 1);
  EXPECT_TRUE(throws_with<ConfigError>(
      [] { (void)direct_memory_wanted(); },
      "environment variable LOCKSTEP_DIRECT_MEMORY: found 'off', allowed: 0 or 1"));
  ::setenv(kName, kept.c_str(), 1);
}

}  // namespace
}  // namespace lockstep
