// How ranks meet: what they announce and compare, who is refused, where the store listens.

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <sstream>
#include <thread>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/gathering.h"
#include "lockstep/parallel_state/network.h"
#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/tests/support/launch.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using testing::environment_of;
using testing::free_port;
using testing::throws_with;

ParallelStateOptions options_of(int64_t world, milliseconds timeout = std::chrono::seconds(20)) {
  ParallelStateOptions options;
  options.sizes.world_size = world;
  options.timeout = timeout;
  return options;
}

/// The error of each of `threads` threads, or "".
std::vector<std::string> errors_of(size_t threads, const std::function<void(size_t)>& body) {
  std::vector<std::string> errors(threads);
  std::vector<std::thread> running;
  for (size_t i = 0; i < threads; ++i)
    running.emplace_back([&, i] {
      try {
        body(i);
      } catch (const std::exception& error) {
        errors[i] = error.what();
      }
    });
  for (std::thread& thread : running) thread.join();
  return errors;
}

int64_t sum_of_ranks(const ParallelState& state) {
  const at::Tensor tensor = at::full({1}, state.rank(), at::kLong);
  all_reduce(state.world(), tensor, ReduceOp::sum, "rank").wait();
  return tensor.item<int64_t>();
}

/// Addresses at which this process listens, as /proc/net spells them.
std::vector<std::string> listening() {
  std::vector<std::string> own, found;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    if (target.starts_with("socket:[")) own.push_back(target.substr(8, target.size() - 9));
  }
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream lines(table);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::array<std::string, 10> word;
      for (std::string& w : word) words >> w;
      constexpr size_t kLocal = 1, kState = 3, kInode = 9;
      if (word[kState] == "0A" && std::count(own.begin(), own.end(), word[kInode]))
        found.push_back(word[kLocal].substr(0, word[kLocal].find(':')));
    }
  }
  return found;
}

constexpr char kLoopback[] = "0100007F";

TEST(Rendezvous, TheFirstFieldThatDiffersIsNamedOnEveryRank) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto errors = errors_of(4, [&](size_t rank) {
    ParallelStateOptions options = options_of(4);
    options.announcement = {{"train.precision", rank == 2 ? "fp64" : "fp32"},
                            {"train.seed", rank == 2 ? "7" : "1"}};
    const ParallelState state(store, static_cast<int64_t>(rank), options);
  });
  for (const std::string& error : errors)
    EXPECT_EQ(error,
              "train.precision: rank 0 has fp32, rank 2 has fp64; allowed: the same on all ranks");
}

TEST(Rendezvous, WorldSizesParallelSizesAndMissingFieldsAreCompared) {
  const auto refusal = [](const std::function<void(ParallelStateOptions&)>& change) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    const auto errors = errors_of(2, [&](size_t rank) {
      ParallelStateOptions options = options_of(2);
      options.announcement = {{"a", "1"}};
      if (rank == 1) change(options);
      const ParallelState state(store, static_cast<int64_t>(rank), options);
    });
    EXPECT_EQ(errors[0], errors[1]);
    return errors[0];
  };
  EXPECT_EQ(refusal([](auto& o) { o.sizes.world_size = 3; }),
            "world size: rank 0 has 2, rank 1 has 3; allowed: the same on all ranks");
  EXPECT_EQ(refusal([](auto& o) { o.announcement.clear(); }),
            "a: rank 0 has 1, rank 1 has nothing; allowed: the same on all ranks");
  EXPECT_EQ(refusal([](auto& o) {
              o.announcement.push_back({"b", ""});
            }),
            "b: rank 0 has nothing, rank 1 has ; allowed: the same on all ranks");
  EXPECT_TRUE(refusal([](auto& o) { o.sizes.tensor = 2; })
                  .starts_with("parallel sizes: rank 0 has"
                               " tensor 1, "));
  EXPECT_EQ(refusal([](auto& o) { o.group_options[GroupKind::tp].max_ctas = 4; }),
            "group options: rank 0 has none, rank 1 has tp: max_ctas=4; allowed: the same on all "
            "ranks");
  EXPECT_EQ(refusal([](auto&) {}), "");
}

TEST(Rendezvous, ARankClaimedTwiceIsRefusedOnAllRanks) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto errors = errors_of(3, [&](size_t i) {  // ranks 0, 1, 1 of 3
    const ParallelState state(store, i == 0 ? 0 : 1, options_of(3));
  });
  const std::string process = process_name();
  for (const std::string& error : errors)
    EXPECT_TRUE(error.starts_with("rank 1 is claimed twice, by the processes " + process + " and " +
                                  process + "; allowed: "))
        << error;
}

TEST(Rendezvous, ALatecomerIsRefusedAndTheRunGoesOn) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto errors = errors_of(2, [&](size_t rank) {
    const ParallelState state(store, static_cast<int64_t>(rank), options_of(2));
    EXPECT_EQ(sum_of_ranks(state), 1);
    if (rank == 0) {
      EXPECT_TRUE(throws_with<CommunicationError>([&] { ParallelState(store, 1, options_of(2)); },
                                                  "rank 1 is claimed twice"));
    }
    EXPECT_EQ(sum_of_ranks(state), 1);
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

TEST(Rendezvous, RanksThatDoNotComeAreNamed) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (const auto& error : errors_of(2, [&](size_t i) {
         ParallelState(store, i == 0 ? 1 : 3, options_of(5, milliseconds(1500)));
       }))
    EXPECT_EQ(error, "ranks 0, 2, 4 did not arrive within 1.5 s: 2 of 5 ranks have arrived");
  const auto large = c10::make_intrusive<c10d::HashStore>();
  EXPECT_TRUE(throws_with<CommunicationError>(
      [&] { ParallelState(large, 4, options_of(1000, milliseconds(100))); },
      "ranks 0, 1, 2, 3, 5, 6, 7, 8, 9, 10, ... did not arrive within 0.1 s: 1 of 1000 ranks "
      "have"));
}

/// A store for ranks of which `died` was to name the missing ones; the rank that takes over dies
/// too. Counts the requests that look for ranks.
struct StoreOfDyingReporters : c10d::HashStore {
  using Bytes = std::vector<uint8_t>;
  static Bytes bytes(const std::string& text) { return {text.begin(), text.end()}; }

  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& wanted) override {
    if (key.ends_with("/reporter") && expected == died)
      c10d::HashStore::compareSet(key, expected, bytes("another one that has died"));
    return c10d::HashStore::compareSet(key, expected, wanted);
  }
  bool check(const std::vector<std::string>& keys) override {
    if (keys.front().find("/here/") != std::string::npos) ++num_looks;
    return c10d::HashStore::check(keys);
  }

  const Bytes died = bytes("a process that has died");
  std::atomic<int> num_looks = 0;
};

/// One of the others says it, after 3 s for each of those that died.
TEST(Rendezvous, RanksThatDoNotComeAreNamedWithoutTheRankThatWasToNameThem) {
  constexpr int64_t kWorld = 16;
  const auto store = c10::make_intrusive<StoreOfDyingReporters>();
  store->set("lockstep//1/reporter", store->died);
  const auto begin = std::chrono::steady_clock::now();
  for (const auto& error : errors_of(8, [&](size_t rank) {
         ParallelState(store, static_cast<int64_t>(rank), options_of(kWorld, milliseconds(1500)));
       }))
    EXPECT_EQ(error,
              "ranks 8, 9, 10, 11, 12, 13, 14, 15 did not arrive within 1.5 s: 8 of 16 ranks have "
              "arrived");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(9500));
  EXPECT_EQ(store->num_looks, 1 + kWorld) << "one rank looks for all at once, then for each";
}

TEST(Rendezvous, ARankStopsLookingOnceAnotherHasNamedTheRanks) {
  const auto store = c10::make_intrusive<StoreOfDyingReporters>();
  c10d::PrefixStore keys("run", store);
  RankList ranks(1000);
  std::iota(ranks.begin(), ranks.end(), 0);
  EXPECT_EQ(absent_ranks(keys, ranks, [&] { return store->num_looks > 200; }).count, 256);
  EXPECT_EQ(absent_ranks(keys, ranks).count, 1000);
}

/// A launcher knows of ranks that have died before they could say anything.
TEST(Rendezvous, RanksThatWillNeverComeAreNotWaitedFor) {
  const auto begin = std::chrono::steady_clock::now();
  const auto options = [](int64_t world) {
    ParallelStateOptions of_world = options_of(world);
    of_world.meeting_obstacle = [] { return std::optional<std::string>("rank 2 was killed"); };
    return of_world;
  };
  const int port = free_port();
  EXPECT_TRUE(throws_with<CommunicationError>(
      [&] { ParallelState(environment_of(1, 3, port), options(3)); },
      fmt::format("rank 1 cannot reach the store at 127.0.0.1:{}: rank 2 was killed", port)));
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (const auto& error : errors_of(
           2, [&](size_t rank) { ParallelState(store, static_cast<int64_t>(rank), options(3)); }))
    EXPECT_EQ(error, "rank 2 was killed before all ranks had met");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(8));
}

TEST(Rendezvous, RanksThatHaveAllLeftCanMeetAgain) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const int port = free_port();
  const auto errors = errors_of(3, [&](size_t rank) {
    for (int round = 0; round < 5; ++round) {
      const ParallelState state(store, static_cast<int64_t>(rank), options_of(3));
      EXPECT_EQ(sum_of_ranks(state), 3);
    }
    for (int round = 0; round < 5; ++round) {
      const ParallelState state(environment_of(static_cast<int>(rank), 3, port), options_of(3));
      EXPECT_EQ(sum_of_ranks(state), 3);
    }
  });
  EXPECT_EQ(errors, std::vector<std::string>(3));
}

TEST(Rendezvous, TheTimeoutOfTheCallersStoreStays) {
  constexpr std::chrono::seconds kOwn(77);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  store->setTimeout(kOwn);
  const auto errors = errors_of(2, [&](size_t rank) {
    const ParallelState state(store, static_cast<int64_t>(rank), options_of(2));
    EXPECT_EQ(sum_of_ranks(state), 1);
    EXPECT_EQ(store->getTimeout(), kOwn);
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
  EXPECT_EQ(store->getTimeout(), kOwn) << "after the ranks have checked out";
}

TEST(Rendezvous, RanksMeetAgainAfterARefusal) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto errors = errors_of(2, [&](size_t rank) {
    ParallelStateOptions options = options_of(2);
    options.announcement = {{"seed", std::to_string(rank)}};
    EXPECT_THROW(ParallelState(store, static_cast<int64_t>(rank), options), ConfigError);
    const ParallelState state(store, static_cast<int64_t>(rank), options_of(2));
    EXPECT_EQ(sum_of_ranks(state), 1);
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

/// A rank that is connecting cannot be interrupted. Another rank may have failed and left long
/// before; its post must remain readable even if it served the store.
TEST(Rendezvous, TheServerOfTheStoreStaysForARankThatIsConnecting) {
  constexpr int kWorld = 3;
  const int port = free_port();
  std::atomic<int> connecting = 0;
  const auto errors = errors_of(kWorld, [&](size_t rank) {
    ParallelStateOptions options = options_of(kWorld);
    options.backend_factory = [&](const BackendSpec&) -> c10::intrusive_ptr<c10d::Backend> {
      ++connecting;
      while (connecting < kWorld) std::this_thread::sleep_for(milliseconds(1));
      if (rank == 0) throw std::runtime_error("no route to rank 2");
      std::this_thread::sleep_for(std::chrono::seconds(4));
      throw std::runtime_error("nobody answers");
    };
    const ParallelState state(environment_of(static_cast<int>(rank), kWorld, port), options);
    state.world();
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("no route to rank 2"), std::string::npos) << error;
    EXPECT_EQ(error.find("which serves the store"), std::string::npos) << error;
  }
}

TEST(Rendezvous, RunsWithDifferentIdsShareAStore) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto errors = errors_of(4, [&](size_t i) {
    ParallelStateOptions options = options_of(2);
    options.run_id = i < 2 ? "first" : "second";
    options.announcement = {{"run", options.run_id}};
    const ParallelState state(store, static_cast<int64_t>(i % 2), options);
    EXPECT_EQ(sum_of_ranks(state), 1);
  });
  EXPECT_EQ(errors, std::vector<std::string>(4));
}

TEST(Rendezvous, NothingListensOffLoopback) {
  const int port = free_port();
  const auto errors = errors_of(3, [&](size_t rank) {
    LaunchEnvironment environment = environment_of(static_cast<int>(rank), 3, port);
    environment.master_address = "localhost";
    const ParallelState state(environment, options_of(3));
    EXPECT_EQ(sum_of_ranks(state), 3);
    const std::vector<std::string> addresses = listening();
    EXPECT_GE(addresses.size(), 2U);  // the store, and Gloo
    for (const std::string& address : addresses) EXPECT_EQ(address, kLoopback);
    barrier(state.world(), "end");
  });
  EXPECT_EQ(errors, std::vector<std::string>(3));
}

TEST(Rendezvous, APortInUseIsNamed) {
  const int port = free_port();
  const int other = bound_socket("127.0.0.1", port, false);
  ASSERT_EQ(::listen(other, 1), 0);
  const std::string address = "127.0.0.1:" + std::to_string(port);
  EXPECT_TRUE(throws_with<CommunicationError>(
      [&] { ParallelState(environment_of(0, 2, port), options_of(2)); },
      "rank 0 cannot serve the store at " + address + ": " + address +
          ": cannot listen: Address already in use"));
  // A server that is not a store answers there.
  const auto start = std::chrono::steady_clock::now();
  EXPECT_TRUE(throws_with<CommunicationError>(
      [&] { ParallelState(environment_of(1, 2, port), options_of(2, milliseconds(500))); },
      "rank 1 cannot reach the store at " + address +
          ": rank 0 did not serve it within 0.5 s (the process listening there gave"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  ::close(other);
}

/// The client comes while rank 0 waits for rank 1.
TEST(Rendezvous, AClientOfAnotherRunIsRefusedAndTheRunGoesOn) {
  const int port = free_port();
  const auto errors = errors_of(2, [&](size_t rank) {
    LaunchEnvironment environment = environment_of(static_cast<int>(rank), 2, port);
    if (rank == 1) {
      environment.run_id = "yesterday";
      EXPECT_TRUE(throws_with<CommunicationError>(
          [&] { ParallelState(environment, options_of(2)); },
          "rank 1 cannot use the store at 127.0.0.1:" + std::to_string(port) +
              ": run id: rank 0, which serves it, has 'today', rank 1 has 'yesterday'; allowed: "
              "the same on all ranks"));
    }
    environment.run_id = "today";
    const ParallelState state(environment, options_of(2));
    EXPECT_EQ(sum_of_ranks(state), 1);
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

/// It has spoken before rank 1 comes, and stays until the ranks have met.
TEST(Rendezvous, AForeignClientDoesNotDisturb) {
  const int port = free_port();
  const auto errors = errors_of(2, [&](size_t rank) {
    int stranger = -1, error = 0;
    if (rank == 1) {
      ASSERT_EQ(wait_for_answer("127.0.0.1", port, "", "",
                                std::chrono::steady_clock::now() + std::chrono::seconds(10)),
                "");
      stranger = connected_socket({"127.0.0.1"}, port, std::chrono::seconds(10), &error);
      ASSERT_GE(stranger, 0) << error;
      const std::string garbage(1000, 'x');
      EXPECT_GT(::send(stranger, garbage.data(), garbage.size(), MSG_NOSIGNAL), 0);
    }
    const ParallelState state(environment_of(static_cast<int>(rank), 2, port), options_of(2));
    EXPECT_EQ(sum_of_ranks(state), 1);
    if (rank == 1) ::close(stranger);
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

TEST(Rendezvous, AnAddressThatOtherHostsCannotReachIsRefusedForThem) {
  EXPECT_TRUE(throws_with<CommunicationError>([] { bound_socket("localhost", 0, true); },
                                              "localhost:0: cannot listen: it is a "
                                              "loopback address, which other hosts cannot reach"));
  EXPECT_TRUE(throws_with<CommunicationError>([] { bound_socket("192.0.2.1", 0, false); },
                                              "192.0.2.1:0: cannot listen: Cannot assign"));
}

}  // namespace
}  // namespace lockstep
