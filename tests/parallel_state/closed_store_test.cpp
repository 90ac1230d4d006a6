// The store behind a secret: what strangers get and cost, while ranks that know the secret are
// served. The strangers are written by hand, on bare sockets.

#include "lockstep/parallel_state/closed_store.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <thread>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/network.h"
#include "lockstep/parallel_state/store_door.h"
#include "lockstep/tests/support/launch.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

const auto kRanksSecret = std::make_shared<Secret>("what all ranks know");

Connection::Deadline soon() { return steady_clock::now() + seconds(10); }

/// A connection that sends what the test tells it.
class Stranger {
 public:
  explicit Stranger(int port) {
    int error = 0;
    socket_ = connected_socket({"127.0.0.1"}, port, seconds(10), &error);
    EXPECT_GE(socket_, 0) << std::strerror(error);
  }
  ~Stranger() { ::close(socket_); }
  Stranger(const Stranger&) = delete;
  Stranger& operator=(const Stranger&) = delete;

  void say(const std::string& bytes) const {
    ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }
  /// Reads `bytes` bytes, or fewer if the other end closes first.
  std::string hear(size_t bytes) const {
    std::string heard(bytes, '\0');
    const ssize_t size = ::recv(socket_, heard.data(), bytes, MSG_WAITALL);
    heard.resize(static_cast<size_t>(std::max(size, ssize_t{0})));
    return heard;
  }
  /// Reads until the other end closes.
  std::string hear_out() const { return hear(1 << 20); }
  bool closed_within(milliseconds patience) const {
    pollfd poll = {.fd = socket_, .events = POLLRDHUP, .revents = 0};
    return ::poll(&poll, 1, static_cast<int>(patience.count())) > 0;
  }

 private:
  int socket_ = -1;
};

class AClosedStore : public ::testing::Test {
 protected:
  AClosedStore() { serve({}); }

  void serve(DoorLimits limits) {
    store_.reset();
    port_ = testing::free_port();
    store_ = std::make_unique<ClosedStore>(bound_socket("127.0.0.1", port_, false), kRanksSecret,
                                           limits);
  }

  /// As a rank, adds 1 under a name. Returns the new sum.
  int64_t add(const std::string& name, const Secret& secret = *kRanksSecret) const {
    Connection connection;
    connection.open("127.0.0.1", port_, soon());
    enter_store(connection, secret, soon());
    return add(connection, name);
  }
  static int64_t add(Connection& connection, const std::string& name) {
    int64_t sum = 1;
    const uint64_t length = name.size();
    std::string request(1, static_cast<char>(StoreQuery::add));
    request.append(reinterpret_cast<const char*>(&length), sizeof length);
    request += name;
    request.append(reinterpret_cast<const char*>(&sum), sizeof sum);
    connection.send(request, soon());
    connection.receive(&sum, sizeof sum, soon());
    return sum;
  }

  /// Waits for the count: a stranger may see its end before it is counted.
  void expect_refused(int64_t number) const {
    for (const auto end = soon(); store_->refused() < number && steady_clock::now() < end;)
      ::usleep(1000);
    EXPECT_EQ(store_->refused(), number);
  }

  int port_ = 0;
  std::unique_ptr<ClosedStore> store_;
};

TEST_F(AClosedStore, ServesWhoKnowsTheSecret) {
  EXPECT_EQ(add("count"), 1);
  EXPECT_EQ(add("count"), 2);
  EXPECT_EQ(store_->refused(), 0);
}

TEST_F(AClosedStore, AnotherSecretIsRefusedAtOnceAndToldSo) {
  const Secret other("what all ranks knew");
  EXPECT_THROW(add("count", other), SecretRefused);
  expect_refused(1);
  EXPECT_EQ(add("count"), 1);
}

TEST_F(AClosedStore, AProofThatWasRecordedIsRefused) {
  const Stranger first(port_);
  const ProofOfServer proof(first.hear(kGreetingBytes));
  const std::string answer = proof.answer(*kRanksSecret);
  first.say(answer);
  EXPECT_EQ(first.hear(1), std::string(1, kProofHolds));
  const Stranger second(port_);
  second.hear(kGreetingBytes);
  second.say(answer);
  EXPECT_EQ(second.hear_out(), std::string(1, kProofFails));
  expect_refused(1);
}

/// A request before the proof is not examined, whatever it says.
TEST_F(AClosedStore, GarbageIsClosedAtItsFirstByte) {
  for (const std::string& garbage :
       {std::string(1, '\0'), std::string("GET / HTTP/1.0\r\n\r\n"), std::string(1 << 20, '\x01'),
        std::string(kProofMagic) + std::string(64, 'x'),
        std::string(kProofMagic.substr(0, 15)) + "2"}) {
    const Stranger stranger(port_);
    EXPECT_EQ(stranger.hear(kGreetingBytes).substr(0, kProofMagic.size()), kProofMagic);
    stranger.say(garbage);
    EXPECT_TRUE(stranger.closed_within(seconds(2))) << garbage.substr(0, 20);
  }
  expect_refused(5);
  EXPECT_EQ(add("count"), 1);
}

TEST_F(AClosedStore, AnAnswerMayComeInPieces) {
  const Stranger slow(port_);
  const ProofOfServer proof(slow.hear(kGreetingBytes));
  for (const char byte : proof.answer(*kRanksSecret)) {
    slow.say(std::string(1, byte));
    ::usleep(500);
  }
  EXPECT_EQ(slow.hear(1), std::string(1, kProofHolds));
  EXPECT_EQ(store_->refused(), 0);
}

TEST_F(AClosedStore, SilenceAndHalfAnswersEndAfterAWhile) {
  serve({.patience = seconds(2)});
  Connection rank;
  rank.open("127.0.0.1", port_, soon());
  enter_store(rank, *kRanksSecret, soon());
  const Stranger silent(port_), half(port_);
  const ProofOfServer proof(half.hear(kGreetingBytes));
  half.say(proof.answer(*kRanksSecret).substr(0, kAnswerBytes - 1));
  EXPECT_FALSE(silent.closed_within(milliseconds(50)));
  EXPECT_EQ(half.hear_out(), "");
  EXPECT_EQ(silent.hear_out().size(), kGreetingBytes);
  expect_refused(2);
  // The connection with a proof came before them, and has not ended.
  EXPECT_EQ(add(rank, "count"), 1);
}

TEST_F(AClosedStore, WhoLeavesWithoutAWordIsNotCounted) {
  {
    const Stranger silent(port_), hasty(port_);
    silent.hear(kGreetingBytes);
  }
  {
    const Stranger wrong(port_), half(port_);
    half.hear(kGreetingBytes);
    half.say(std::string(kProofMagic));
    wrong.hear(kGreetingBytes);
    wrong.say(std::string(kAnswerBytes, 'x'));
    EXPECT_TRUE(wrong.closed_within(seconds(2)));
  }
  expect_refused(2);
  EXPECT_EQ(add("count"), 1);
  EXPECT_EQ(add("count"), 2);  // all that came before has been served
  EXPECT_EQ(store_->refused(), 2);
}

/// A rank that gets no greeting asks libtorch's way whether the store is an open one, and gives up.
TEST_F(AClosedStore, RanksThatGaveUpWhileItWasSuspendedAreNotCounted) {
  store_.reset();
  port_ = testing::free_port();
  const int bound = bound_socket("127.0.0.1", port_, false);
  ASSERT_EQ(::listen(bound, 16), 0);
  {
    const Stranger silent(port_), asks(port_);
    asks.say("\x01\x02\x03\x04");
  }
  store_ = std::make_unique<ClosedStore>(bound, kRanksSecret);
  EXPECT_EQ(add("count"), 1);
  EXPECT_EQ(add("count"), 2);
  EXPECT_EQ(store_->refused(), 0);
}

/// Small enough for 1024 descriptors, the usual limit: this process holds both ends.
TEST_F(AClosedStore, AFloodKeepsNobodyOut) {
  constexpr size_t kFlood = 200, kWaiting = 16, kBetween = 20;
  serve({.waiting = kWaiting});
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (size_t i = 0; i < kFlood; ++i) {
    strangers.push_back(std::make_unique<Stranger>(port_));
    if (i % kBetween == 0) {
      EXPECT_EQ(add("count"), static_cast<int64_t>(i / kBetween + 1));
    }
  }
  // The newest still wait. The others were closed for them, oldest first.
  expect_refused(kFlood - kWaiting);
  EXPECT_TRUE(strangers.front()->closed_within(seconds(2)));
  EXPECT_FALSE(strangers.back()->closed_within(milliseconds(50)));
  EXPECT_EQ(add("count"), kFlood / kBetween + 1);
  store_->close();
  EXPECT_EQ(store_->refused(), kFlood);
}

/// If descriptors run out, strangers are closed first, and a rank that connects then still gets in.
TEST_F(AClosedStore, TheLastDescriptorsAreForRanks) {
  rlimit before = {};
  ::getrlimit(RLIMIT_NOFILE, &before);
  std::vector<std::unique_ptr<Stranger>> strangers;
  for (int i = 0; i < 40; ++i) {
    strangers.push_back(std::make_unique<Stranger>(port_));
    strangers.back()->hear(kGreetingBytes);  // the store has accepted it
  }
  const auto open = std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  rlimit scarce = before;
  scarce.rlim_cur = static_cast<rlim_t>(open);  // the rank takes one; none is left for the store
  ::setrlimit(RLIMIT_NOFILE, &scarce);
  EXPECT_EQ(add("count"), 1);
  ::setrlimit(RLIMIT_NOFILE, &before);
}

TEST_F(AClosedStore, AnAddressThatIsTakenIsNamedAndNothingStaysOpen) {
  const auto open = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  };
  const int port = testing::free_port();
  const int first = bound_socket("127.0.0.1", port, false);
  const auto before = open();
  const int second = bound_socket("127.0.0.1", port, false);  // both are bound, neither listens
  ::listen(first, 1);
  EXPECT_TRUE(testing::throws_with<CommunicationError>([&] { ClosedStore(second, kRanksSecret); },
                                                       "cannot listen: Address already in use"));
  EXPECT_EQ(open(), before);
  ::close(first);
}

TEST_F(AClosedStore, ARequestOverABoundEndsItsConnectionAlone) {
  const auto number = [](uint64_t value) {
    return std::string(reinterpret_cast<const char*>(&value), sizeof value);
  };
  const auto of = [](StoreQuery query) { return std::string(1, static_cast<char>(query)); };
  for (const std::string& request :
       {of(StoreQuery::get) + number(StoreRequest::kLongestName + 1),
        of(StoreQuery::set) + number(1) + "k" + number(StoreRequest::kLongestValue + 1),
        of(StoreQuery::check) + number(StoreRequest::kMostNames + 1),
        std::string("\x06\x63\x12")}) {
    Connection rank;
    rank.open("127.0.0.1", port_, soon());
    enter_store(rank, *kRanksSecret, soon());
    rank.send(request, soon());
    char byte = 0;
    EXPECT_THROW(rank.receive(&byte, 1, soon()), Connection::Ended);
  }
  EXPECT_EQ(add("count"), 1);
  EXPECT_EQ(store_->refused(), 0);
}

TEST_F(AClosedStore, ManyRequestsAtOnceAndAReaderThatIsLate) {
  Connection rank;
  rank.open("127.0.0.1", port_, soon());
  enter_store(rank, *kRanksSecret, soon());
  const auto text = [](const std::string& bytes) {
    const uint64_t length = bytes.size();
    return std::string(reinterpret_cast<const char*>(&length), sizeof length) + bytes;
  };
  const std::string value(4 << 20, 'v');
  rank.send(std::string(1, static_cast<char>(StoreQuery::set)) + text("k") + text(value), soon());
  constexpr int kTimes = 20;
  std::string requests;
  for (int i = 0; i < kTimes; ++i)
    requests += std::string(1, static_cast<char>(StoreQuery::get)) + text("k");
  rank.send(requests, soon());
  ::usleep(200'000);  // meanwhile 80 MiB of answers are waiting
  EXPECT_EQ(add("other"), 1);
  for (int i = 0; i < kTimes; ++i) {
    std::string answer(8 + value.size(), '\0');
    rank.receive(answer.data(), answer.size(), soon());
    EXPECT_EQ(answer, text(value));
  }
}

TEST_F(AClosedStore, ARankKnowsWhatIsWrongWithTheSecret) {
  const auto refusal = [&](const Secret& secret, bool open_store_answers) -> std::string {
    try {
      return wait_to_enter_store("127.0.0.1", port_, secret,
                                 steady_clock::now() + milliseconds(500), {},
                                 [&] { return open_store_answers; });
    } catch (const SecretRefused& refused) {
      return refused.what();
    }
  };
  const std::string allowed =
      "; allowed: the same on all ranks, in LOCKSTEP_SECRET or LOCKSTEP_SECRET_FILE";
  EXPECT_EQ(refusal(*kRanksSecret, false), "");
  EXPECT_EQ(refusal(Secret("what all ranks knew"), false),
            "secret: rank 0, which serves it, has a different one than this rank" + allowed);
  // Something listens but does not greet.
  store_.reset();
  const int mute = bound_socket("127.0.0.1", port_, false);
  ::listen(mute, 16);
  EXPECT_EQ(refusal(*kRanksSecret, true),
            "secret: rank 0, which serves it, has none, and this rank has one" + allowed);
  EXPECT_EQ(refusal(*kRanksSecret, false), "the process listening there gave an unexpected answer");
  ::close(mute);
  EXPECT_EQ(refusal(*kRanksSecret, false), "Connection refused");
  // Something sends another greeting, and gets no answer that it could use.
  const int talking = bound_socket("127.0.0.1", port_, false);
  ::listen(talking, 16);
  std::thread talker([&] {
    const int guest = ::accept(talking, nullptr, nullptr);
    const std::string words(kGreetingBytes + 1 + kSignatureBytes, 'y');
    ::send(guest, words.data(), words.size(), MSG_NOSIGNAL);
    char byte = 0;
    EXPECT_LE(::recv(guest, &byte, 1, MSG_WAITALL), 0);
    ::close(guest);
  });
  EXPECT_EQ(refusal(*kRanksSecret, false), "the process listening there gave an unexpected answer");
  talker.join();
  ::close(talking);
  EXPECT_NO_THROW(check_no_greeting("\x01\x02\x03\x04"));
  EXPECT_NO_THROW(check_no_greeting(""));
  EXPECT_THROW(check_no_greeting("lock"), SecretRefused);
}

TEST(RefusedConnections, AreCountedInWords) {
  EXPECT_EQ(refused_connections(1), "1 connection without the secret was refused");
  EXPECT_EQ(refused_connections(17), "17 connections without the secret were refused");
}

}  // namespace
}  // namespace lockstep
