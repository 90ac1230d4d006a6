// The client of the store: it and libtorch's own client read each other's writes, and no question
// outlasts the timeout, whatever has happened to the server.

#include "lockstep/parallel_state/store_client.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <future>
#include <memory>
#include <numeric>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/parallel_state/closed_store.h"
#include "lockstep/parallel_state/desync_guard.h"
#include "lockstep/parallel_state/failure_board.h"
#include "lockstep/parallel_state/network.h"
#include "lockstep/tests/support/launch.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using testing::free_port;
using testing::throws_with;
using Bytes = StoreClient::Bytes;

StoreAddress address_at(int port) {
  return {.host = "127.0.0.1", .port = port, .server = "rank 0, which serves the store,"};
}

c10::intrusive_ptr<StoreClient> client_at(int port, milliseconds timeout = milliseconds(5000)) {
  return c10::make_intrusive<StoreClient>(address_at(port), timeout);
}

c10::intrusive_ptr<c10d::TCPStore> served_at(int port) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.isServer = true;
  options.waitWorkers = false;
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

/// Accepts connections but never answers, like a stopped process.
class MuteServer {
 public:
  MuteServer() : port_(free_port()), socket_(bound_socket("127.0.0.1", port_, false)) {
    ::listen(socket_, 16);
  }
  ~MuteServer() { ::close(socket_); }
  MuteServer(const MuteServer&) = delete;
  MuteServer& operator=(const MuteServer&) = delete;
  int port() const { return port_; }

 private:
  int port_, socket_;
};

/// Seconds that `body` takes.
double seconds_of(const std::function<void()>& body) {
  const auto start = steady_clock::now();
  body();
  return std::chrono::duration<double>(steady_clock::now() - start).count();
}

TEST(StoreClient, ReadsWhatLibtorchsClientWritesAndTheOtherWayRound) {
  const int port = free_port();
  const auto libtorch = served_at(port);
  const auto client = client_at(port);
  const Bytes long_value(1 << 20, 7), empty;
  c10d::Store* const stores[] = {libtorch.get(), client.get()};
  for (const int writer : {0, 1}) {
    c10d::Store &to = *stores[writer], &from = *stores[1 - writer];
    const std::string name = "writer " + std::to_string(writer) + " ";
    to.set(name + "set", long_value);
    EXPECT_EQ(from.get(name + "set"), long_value);
    to.set(name + "empty", empty);
    EXPECT_EQ(from.get(name + "empty"), empty);
    to.append(name + "set", {1, 2});
    to.getNumKeys();  // append has no answer; one connection's requests are served in order
    EXPECT_EQ(from.get(name + "set").size(), long_value.size() + 2);
    EXPECT_EQ(to.add(name + "add", 5), 5);
    EXPECT_EQ(from.add(name + "add", -7), -2);
    to.multiSet({name + "a", name + "b"}, {{1}, {2, 3}});
    EXPECT_EQ(from.multiGet({name + "b", name + "a"}), (std::vector<Bytes>{{2, 3}, {1}}));
    EXPECT_TRUE(from.check({name + "a", name + "b"}));
    EXPECT_FALSE(from.check({name + "a", name + "c"}));
    from.wait({name + "a"}, milliseconds(1000));
    const Bytes none, first = {1}, second = {2};
    EXPECT_EQ(to.compareSet(name + "compare", none, first), first);
    EXPECT_EQ(from.compareSet(name + "compare", none, second), first);
    EXPECT_EQ(from.compareSet(name + "compare", first, second), second);
    EXPECT_EQ(to.getNumKeys(), from.getNumKeys());
    EXPECT_TRUE(from.deleteKey(name + "compare"));
    EXPECT_FALSE(to.deleteKey(name + "compare"));
  }
}

TEST(StoreClient, AWaitEndsAndLetsOtherThreadsAskMeanwhile) {
  const int port = free_port();
  const auto libtorch = served_at(port);
  const auto client = client_at(port);
  auto waiting =
      std::async(std::launch::async, [&] { return seconds_of([&] { client->wait({"late"}); }); });
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_EQ(client->add("count", 1), 1);
  libtorch->set("late", Bytes{1});
  EXPECT_LT(waiting.get(), 3);
  EXPECT_TRUE(
      throws_with<c10::DistStoreError>([&] { client->wait({"never"}, milliseconds(200)); },
                                       "'never' was not written to the store within 0.2 s"));
}

TEST(StoreClient, NoQuestionToAMuteServerOutlastsTheTimeout) {
  const MuteServer server;
  const auto client = client_at(server.port(), milliseconds(300));
  const Bytes large(64 << 20, 1);  // more than the socket buffers hold
  const std::vector<std::function<void()>> questions = {
      [&] { client->check({"key"}); },
      [&] { client->get("key"); },
      [&] { client->add("key", 1); },
      [&] { client->wait({"key"}); },
      [&] { client->multiGet({"key"}); },
      [&] { client->getNumKeys(); },
      [&] { client->deleteKey("key"); },
      [&] { client->set("key", large); },
      [&] { client->compareSet("key", {}, large); },
      [&] { client->clone()->check({"key"}); }};
  for (const auto& question : questions)
    EXPECT_LT(seconds_of([&] {
                EXPECT_TRUE(throws_with<c10::DistNetworkError>(
                    question, "rank 0, which serves the store, has not answered for 0.3 s"));
              }),
              2);
  EXPECT_FALSE(client->server_has_gone());
}

TEST(StoreClient, AServerThatCannotBeFoundIsToldAtOnce) {
  StoreAddress address = address_at(free_port());
  address.host = std::string(64, 'a');  // a longer label than a name may have
  const std::string reason =
      wait_for_answer(address.host, address.port, "", "", steady_clock::now());
  const auto client = c10::make_intrusive<StoreClient>(address, milliseconds(60'000));
  EXPECT_TRUE(throws_with<c10::DistNetworkError>(
      [&] { client->check({"key"}); },
      "rank 0, which serves the store, has not answered for 0.0 s (" + reason + ")"));
  EXPECT_FALSE(client->server_has_gone());
}

TEST(StoreClient, AServerThatHasEndedIsKnownWithoutAQuestion) {
  const int port = free_port();
  auto libtorch = served_at(port);
  const auto client = client_at(port);
  EXPECT_EQ(client->add("key", 1), 1);
  EXPECT_FALSE(client->server_has_gone());
  libtorch.reset();
  EXPECT_TRUE(client->server_has_gone());
  EXPECT_TRUE(throws_with<c10::DistNetworkError>([&] { client->set("key", Bytes{1}); },
                                                 "rank 0, which serves the store, has exited"));
  const auto late = client_at(port);
  EXPECT_TRUE(throws_with<c10::DistNetworkError>([&] { late->check({"key"}); }, "has exited"));
  EXPECT_TRUE(late->server_has_gone());
}

TEST(StoreClient, AServerThatAnswersAgainIsAskedAgain) {
  const int port = free_port();
  const int mute = bound_socket("127.0.0.1", port, false);
  ::listen(mute, 16);
  const auto client = client_at(port, milliseconds(200));
  EXPECT_THROW(client->check({"key"}), c10::DistNetworkError);
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(port);
  options.isServer = true;
  options.waitWorkers = false;
  options.masterListenFd = mute;  // also serves earlier connections
  const auto libtorch = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  client->setTimeout(milliseconds(5000));
  EXPECT_EQ(client->add("key", 2), 2);
}

TEST(StoreClient, AnInterruptEndsTheQuestionOfAnotherThread) {
  const MuteServer server;
  const auto client = client_at(server.port(), milliseconds(60000));
  auto asking = std::async(std::launch::async, [&] {
    return seconds_of([&] { EXPECT_THROW(client->check({"key"}), c10::DistNetworkError); });
  });
  std::this_thread::sleep_for(milliseconds(200));
  client->interrupt();
  EXPECT_LT(asking.get(), 10);
}

StoreAddress closed_at(int port) {
  StoreAddress address = address_at(port);
  address.secret = std::make_shared<Secret>("what all ranks know");
  return address;
}

/// A ClosedStore turns guests away that have not proved that they know the secret, if there are too
/// many.
TEST(StoreClient, AStoreThatTurnsItAwayBeforeTheProofIsAskedAgain) {
  const StoreAddress address = closed_at(free_port());
  const int bound = bound_socket("127.0.0.1", address.port, false);
  ASSERT_EQ(::listen(bound, 16), 0);
  const auto client = c10::make_intrusive<StoreClient>(address, milliseconds(5000));
  auto asking = std::async(std::launch::async, [&] { return client->add("key", 2); });
  const int guest = ::accept(bound, nullptr, nullptr);
  ASSERT_GE(guest, 0);
  ::close(guest);
  auto store = std::make_unique<ClosedStore>(bound, address.secret);
  EXPECT_EQ(asking.get(), 2);
  EXPECT_FALSE(client->server_has_gone());
  store.reset();
  EXPECT_TRUE(client->server_has_gone()) << "the connection was closed after the proof";
  EXPECT_TRUE(throws_with<c10::DistNetworkError>([&] { client->check({"key"}); }, "has exited"));
}

TEST(StoreClient, AStoreThatTurnsItAwayUntilTheTimeoutHasNotAnswered) {
  const StoreAddress address = closed_at(free_port());
  const int bound = bound_socket("127.0.0.1", address.port, false);
  ASSERT_EQ(::listen(bound, 16), 0);
  std::atomic<int> turned_away = 0;
  std::thread door([&] {
    for (int guest; (guest = ::accept(bound, nullptr, nullptr)) >= 0; ++turned_away) ::close(guest);
  });
  const auto client = c10::make_intrusive<StoreClient>(address, milliseconds(300));
  EXPECT_LT(seconds_of([&] {
              EXPECT_TRUE(throws_with<c10::DistNetworkError>(
                  [&] { client->check({"key"}); },
                  "rank 0, which serves the store, has not answered for 0.3 s"));
            }),
            2);
  EXPECT_FALSE(client->server_has_gone());
  ::shutdown(bound, SHUT_RDWR);  // ends accept()
  door.join();
  ::close(bound);
  EXPECT_GT(turned_away, 1);
  EXPECT_TRUE(throws_with<c10::DistNetworkError>([&] { client->check({"key"}); }, "has exited"));
  EXPECT_TRUE(client->server_has_gone()) << "nobody listens there any more";
}

c10::intrusive_ptr<c10d::Store> prefixed(const c10::intrusive_ptr<StoreClient>& client) {
  return c10::make_intrusive<c10d::PrefixStore>(
      "1", c10::make_intrusive<c10d::PrefixStore>("run", client));
}

TEST(FailureBoard, OverAMuteServerFindsNothingAtOnceAndNamesItLater) {
  const MuteServer server;
  double ended = 0;
  {
    const FailureBoard board(prefixed(client_at(server.port())), 1, 2);
    EXPECT_EQ(board.lost_server(), std::nullopt);
    EXPECT_LT(seconds_of([&] { EXPECT_FALSE(board.find().has_value()); }), 0.2);
    EXPECT_LT(seconds_of([&] { board.post("out of cheese"); }), 6);
    EXPECT_LT(seconds_of([&] { EXPECT_THROW(board.ask(), c10::Error); }), 6);
    std::this_thread::sleep_for(kAnswerTime);
    const std::string lost = board.lost_server().value_or("");
    EXPECT_TRUE(lost.starts_with("rank 0, which serves the store, has not answered for ")) << lost;
    EXPECT_LT(seconds_of([&] { board.post("again"); }), 0.2) << "the server is known to be mute";
    ended = -static_cast<double>(steady_clock::now().time_since_epoch().count()) / 1e9;
  }
  ended += static_cast<double>(steady_clock::now().time_since_epoch().count()) / 1e9;
  EXPECT_LT(ended, 1) << "the thread's question outlasts the board";
}

/// Whether a board finds its store lost after this process was suspended, and whether its post
/// arrives. Stops this process between two questions to the store.
int lost_and_posted_after_a_stop() {
  const int port = free_port();
  const auto libtorch = served_at(port);
  const FailureBoard board(prefixed(client_at(port)), 1, 2);
  std::this_thread::sleep_for(milliseconds(400));
  ::raise(SIGSTOP);
  const bool lost = board.lost_server().has_value();
  board.post("out of cheese");
  const bool posted = posted_failure(*prefixed(client_at(port))).has_value();
  return (lost ? 1 : 0) + (posted ? 2 : 0);
}

TEST(FailureBoard, AProcessThatWasSuspendedDoesNotTakeItsStoreForMute) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(lost_and_posted_after_a_stop());
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
  ASSERT_TRUE(WIFSTOPPED(status)) << status;
  std::this_thread::sleep_for(std::chrono::seconds(3));
  ::kill(child, SIGCONT);
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 2) << "1: the store was taken for mute; 2: the failure was posted";
}

TEST(FailureBoard, TellsTheRankThatStandsStillFromThoseThatBeatOrLeftANote) {
  const int port = free_port();
  const auto libtorch = served_at(port);
  const auto board_of = [&](int64_t rank) {
    return std::make_unique<FailureBoard>(prefixed(client_at(port)), rank, 4);
  };
  const auto own = board_of(0), beats = board_of(1), leaves = board_of(2);
  auto stops = board_of(3);
  std::this_thread::sleep_for(milliseconds(500));
  leaves->write_note("doing/2", "has ended");
  stops.reset();
  const auto note_of = [](int64_t rank) { return "doing/" + std::to_string(rank); };
  const FailureBoard::Lost lost = own->find_lost({0, 1, 2, 3}, note_of);
  EXPECT_EQ(lost.silent, RankList{3});
  EXPECT_EQ(lost.text(), "rank 3 does not answer");
  EXPECT_EQ((FailureBoard::Lost{{}, {7, 2, 5}}).text(), "ranks 2, 5, 7 do not answer");
  EXPECT_EQ((FailureBoard::Lost{{3, 1}, {0}}).text(), "ranks 1, 3 have exited");
  own->post_operation("it failed", lost);
  std::this_thread::sleep_for(milliseconds(1000));
  ASSERT_TRUE(beats->find().has_value()) << "the thread looks for failures";
  EXPECT_EQ(beats->find()->text(), "rank 3 does not answer: rank 0: it failed");
  EXPECT_FALSE(own->find().has_value()) << "a rank's own failure";
}

TEST(DesyncGuard, AMuteStoreOfALauncherComesBeforeTheRankThatWasWaitedFor) {
  const MuteServer server;
  StoreAddress address = address_at(server.port());
  address.server = "the launcher's store";
  address.of_launcher = true;
  const auto client = c10::make_intrusive<StoreClient>(address, milliseconds(5000));
  const DesyncGuard guard(std::make_shared<FailureBoard>(prefixed(client), 1, 2), 1);
  std::this_thread::sleep_for(kAnswerTime + milliseconds(500));
  const auto found = guard.explain({0, 1}, nullptr, "all_reduce of loss", "rank 0: timed out");
  EXPECT_TRUE(found.culprit.starts_with("the launcher's store has not answered for "))
      << found.culprit;
  EXPECT_EQ(found.reason, "rank 0: timed out");
  EXPECT_EQ(found.failed, "");
}

/// Counts how often a ledger is asked for.
class CountingStore : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) ledgers_ += key.starts_with("note/ledger/");
    return c10d::HashStore::check(keys);
  }
  int ledgers() const { return ledgers_; }

 private:
  std::atomic<int> ledgers_ = 0;
};

TEST(DesyncGuard, OneOfManyRanksComparesThemForAll) {
  constexpr int64_t kRanks = 100;
  const auto store = c10::make_intrusive<CountingStore>();
  RankList ranks(kRanks);
  std::iota(ranks.begin(), ranks.end(), 0);
  std::vector<std::string> found(kRanks);
  std::vector<std::thread> threads;
  for (const int64_t rank : ranks)
    threads.emplace_back([&, rank] {
      DesyncGuard guard(std::make_shared<FailureBoard>(store, rank, kRanks), rank);
      const auto ledger = guard.ledger("world");
      ledger->add(1, {}, rank == 7 ? "other" : "bucket 0", 4, "Float");
      found[static_cast<size_t>(rank)] =
          guard.explain(ranks, ledger.get(), "all_reduce of bucket 0", "timed out").difference;
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& text : found) {
    EXPECT_TRUE(text.starts_with("the ranks diverge at operation 1 of the group: 99 ranks (0, 1, "))
        << text;
    EXPECT_EQ(text, found[0]);
    EXPECT_LT(text.size(), 1000);
  }
  EXPECT_EQ(store->ledgers(), kRanks);
}

TEST(DesyncGuard, AGroupOfManyRanksIsNoNameTooLongForTheStore) {
  StoreAddress address = address_at(free_port());
  address.secret = std::make_shared<Secret>("what all ranks know");
  const ClosedStore store(bound_socket("127.0.0.1", address.port, false), address.secret);
  const auto board_of = [&](int64_t rank) {
    const auto client = c10::make_intrusive<StoreClient>(address, milliseconds(5000));
    return std::make_shared<FailureBoard>(prefixed(client), rank, 2);
  };
  board_of(0)->post("out of cheese");
  DesyncGuard guard(board_of(1), 1);
  const auto ledger = guard.ledger(std::string(70000, '1'));
  const auto found = guard.explain({0, 1}, ledger.get(), "all_reduce of loss", "timed out");
  EXPECT_EQ(found.failed, "rank 0: out of cheese");
  EXPECT_EQ(found.culprit, "");
}

}  // namespace
}  // namespace lockstep
