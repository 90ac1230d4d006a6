// Ranks that meet with a secret, in a store that rank 0 serves and in a launcher's.

#include <gtest/gtest.h>

#include <cstdlib>
#include <functional>
#include <thread>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/closed_store.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/network.h"
#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/parallel_state/rendezvous.h"
#include "lockstep/parallel_state/store_client.h"
#include "lockstep/tests/support/launch.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using testing::environment_of;
using testing::free_port;
using Bytes = StoreClient::Bytes;
using SecretPtr = std::shared_ptr<const Secret>;

const SecretPtr kSecret = std::make_shared<Secret>("what all ranks know");
const SecretPtr kOther = std::make_shared<Secret>("what all ranks knew");

/// The error of each rank of a world that meets with these secrets, or "".
std::vector<std::string> errors_of(const std::vector<SecretPtr>& secrets, milliseconds timeout,
                                   bool of_launcher = false) {
  const int port = free_port();
  c10::intrusive_ptr<c10d::TCPStore> launchers;
  if (of_launcher) {
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(port);
    options.isServer = true;
    options.waitWorkers = false;
    launchers = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  }
  std::vector<std::string> errors(secrets.size());
  std::vector<std::thread> ranks;
  for (size_t rank = 0; rank < secrets.size(); ++rank)
    ranks.emplace_back([&, rank] {
      LaunchEnvironment environment =
          environment_of(static_cast<int>(rank), static_cast<int>(secrets.size()), port);
      environment.agent_serves_store = of_launcher;
      MembershipSpec spec;
      spec.rank = static_cast<int64_t>(rank);
      spec.world_size = static_cast<int64_t>(secrets.size());
      spec.timeout = timeout;
      spec.secret = secrets[rank];
      try {
        join_run(environment, std::move(spec))->meet();
      } catch (const std::exception& error) {
        errors[rank] = error.what();
      }
    });
  for (std::thread& rank : ranks) rank.join();
  return errors;
}

TEST(SecretRendezvous, RanksWithTheSecretMeetAndTheirGroupsConnect) {
  ::setenv("LOCKSTEP_SECRET", "what all ranks know", 1);
  const int port = free_port();
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank)
    ranks.emplace_back([&, rank] {
      for (int round = 0; round < 2; ++round) {
        ParallelStateOptions options;
        options.timeout = std::chrono::seconds(20);
        const ParallelState state(environment_of(rank, 3, port), options);
        const at::Tensor tensor = at::full({1}, rank, at::kLong);
        all_reduce(state.world(), tensor, ReduceOp::sum, "rank").wait();
        EXPECT_EQ(tensor.item<int64_t>(), 3);
      }
    });
  for (std::thread& rank : ranks) rank.join();
  ::unsetenv("LOCKSTEP_SECRET");
}

std::string rank_1_cannot_use(const std::string& error) {
  const std::string begin = "rank 1 cannot use the store at 127.0.0.1:";
  EXPECT_TRUE(error.starts_with(begin)) << error;
  const size_t colon = error.find(": ", begin.size());
  return colon == std::string::npos ? error : error.substr(colon + 2);
}

TEST(SecretRendezvous, ARankWithAnotherSecretOrNoneIsToldSoAndCounted) {
  const std::string allowed =
      "; allowed: the same on all ranks, in LOCKSTEP_SECRET or LOCKSTEP_SECRET_FILE";
  for (const auto& [secret, difference] : {std::pair(kOther, "a different one than this rank"),
                                           {SecretPtr(), "one, and this rank has none"}}) {
    const auto errors = errors_of({kSecret, secret}, milliseconds(1500));
    EXPECT_EQ(rank_1_cannot_use(errors[1]),
              "secret: rank 0, which serves it, has " + std::string(difference) + allowed);
    EXPECT_EQ(errors[0],
              "rank 1 did not arrive "
              "within 1.5 s: 1 of 2 ranks have arrived; 1 connection without the "
              "secret was refused");
  }
}

TEST(SecretRendezvous, ARankWithASecretWhereRank0HasNoneIsToldSo) {
  const auto errors = errors_of({nullptr, kSecret}, milliseconds(4000));
  EXPECT_EQ(
      rank_1_cannot_use(errors[1]),
      "secret: rank 0, which serves it, has none, and this rank has one; allowed: the same on "
      "all ranks, in LOCKSTEP_SECRET or LOCKSTEP_SECRET_FILE");
  EXPECT_EQ(errors[0], "rank 1 did not arrive within 4.0 s: 1 of 2 ranks have arrived");
}

TEST(SecretRendezvous, InALaunchersStoreTheRanksCompareWhatTheySign) {
  const milliseconds timeout(10'000);
  EXPECT_EQ(errors_of({kSecret, kSecret, kSecret}, timeout, true), std::vector<std::string>(3));
  for (const auto& secrets :
       {std::vector<SecretPtr>{kSecret, kOther}, {kSecret, nullptr}, {nullptr, kSecret}}) {
    const auto errors = errors_of(secrets, timeout, true);
    EXPECT_EQ(errors[0], errors[1]);
    const auto has = [&](size_t rank) {
      return fmt::format("rank {} has {}", rank, secrets[rank] ? "signed as " : "nothing");
    };
    EXPECT_TRUE(errors[0].starts_with("LOCKSTEP_SECRET: " + has(0))) << errors[0];
    EXPECT_NE(errors[0].find(has(1)), std::string::npos) << errors[0];
  }
}

/// Asks both stores the same questions and compares their answers.
TEST(SecretRendezvous, AClosedStoreAnswersAsLibtorchsDoes) {
  const int port = free_port(), open_port = free_port();
  const auto closed =
      std::make_shared<ClosedStore>(bound_socket("127.0.0.1", port, false), kSecret);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(open_port);
  options.isServer = true;
  options.waitWorkers = false;
  const auto open = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  const auto answers = [](c10d::Store& store) {
    std::vector<Bytes> answers;
    const auto note = [&](int64_t number) { answers.push_back({static_cast<uint8_t>(number)}); };
    const Bytes none, one = {1}, two = {2};
    store.set("set", Bytes(1 << 20, 7));
    answers.push_back(store.get("set"));
    store.set("set", none);
    answers.push_back(store.get("set"));
    store.append("set", one);
    store.append("new", two);
    answers.push_back(store.get("set"));
    answers.push_back(store.get("new"));
    note(store.add("sum", 5));
    note(store.add("sum", -7));
    answers.push_back(store.get("sum"));
    store.set("sum", Bytes{'4', '0'});
    note(store.add("sum", 2));
    answers.push_back(store.compareSet("compare", one, two));  // no such key
    note(store.check({"compare"}));
    answers.push_back(store.compareSet("compare", none, one));
    answers.push_back(store.compareSet("compare", none, two));
    answers.push_back(store.compareSet("compare", one, two));
    store.multiSet({"a", "b"}, {one, {2, 3}});
    for (const Bytes& value : store.multiGet({"b", "a"})) answers.push_back(value);
    note(store.check({"a", "b"}));
    note(store.check({"a", "c"}));
    note(store.getNumKeys());
    note(store.deleteKey("a"));
    note(store.deleteKey("a"));
    note(store.getNumKeys());
    return answers;
  };
  StoreClient of_closed({.host = "127.0.0.1", .port = port, .server = "it", .secret = kSecret},
                        milliseconds(5000));
  StoreClient of_open({.host = "127.0.0.1", .port = open_port, .server = "it"}, milliseconds(5000));
  EXPECT_EQ(answers(of_closed), answers(of_open));
}

}  // namespace
}  // namespace lockstep
