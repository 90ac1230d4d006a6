// Connecting to names with several addresses, of which some may not answer.

#include "lockstep/parallel_state/network.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/connection.h"
#include "lockstep/parallel_state/store_door.h"
#include "lockstep/tests/support/launch.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using testing::free_port;

/// An address at which connections are waiting that nobody accepts.
class Listening {
 public:
  Listening(const std::string& address, int port, int backlog)
      : socket_(bound_socket(address, port, /*for_other_hosts=*/false)) {
    ::listen(socket_, backlog);
  }
  ~Listening() { ::close(socket_); }
  Listening(const Listening&) = delete;
  Listening& operator=(const Listening&) = delete;

  int port() const {
    sockaddr_in6 address = {};
    socklen_t size = sizeof address;
    ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size);
    return ntohs(address.sin6_port);
  }

 private:
  int socket_;
};

/// The error of connecting; 0 if it worked.
int connect_to(const std::vector<std::string>& hosts, int port, milliseconds patience) {
  int error = 0;
  const int socket = connected_socket(hosts, port, patience, &error);
  if (socket < 0) return error;
  ::close(socket);
  return 0;
}

/// 127.0.0.2 drops the packets of those who connect to it, because its queue is full.
class AnAddressThatDropsPackets : public ::testing::Test {
 protected:
  AnAddressThatDropsPackets() {
    while (connect_to({"127.0.0.2"}, port_, milliseconds(100)) == 0) {
    }
  }

  const int port_ = free_port();
  const Listening silent_{"127.0.0.2", port_, 0};
};

TEST_F(AnAddressThatDropsPackets, DoesNotHoldUpTheNextOne) {
  const Listening server("127.0.0.1", port_, 16);
  for (const int patience : {400, 2000, 60'000}) {
    const auto start = steady_clock::now();
    EXPECT_EQ(connect_to({"127.0.0.2", "127.0.0.1"}, port_, milliseconds(patience)), 0);
    EXPECT_LT(steady_clock::now() - start, milliseconds(std::min(patience, 1500)));
  }
}

TEST_F(AnAddressThatDropsPackets, IsGivenUpAfterThePatience) {
  for (const std::vector<std::string>& hosts :
       {std::vector<std::string>{"127.0.0.2"}, {"127.0.0.2", "127.0.0.1"}}) {
    const auto start = steady_clock::now();
    EXPECT_EQ(connect_to(hosts, port_, milliseconds(300)), ETIMEDOUT);
    EXPECT_GE(steady_clock::now() - start, milliseconds(300));
    EXPECT_LT(steady_clock::now() - start, milliseconds(1500));
  }
  EXPECT_EQ(connect_to({"127.0.0.1"}, port_, milliseconds(60'000)), ECONNREFUSED);
  EXPECT_EQ(connect_to({}, port_, milliseconds(60'000)), EHOSTUNREACH);
}

TEST_F(AnAddressThatDropsPackets, IsAskedNoLongerThanItsDeadline) {
  const auto start = steady_clock::now();
  EXPECT_NE(
      wait_for_answer("127.0.0.2", port_, "a question", "an answer", start + milliseconds(300)),
      "");
  EXPECT_LT(steady_clock::now() - start, milliseconds(1500));
}

/// No other process is to blame then.
TEST(WithoutADescriptor, TheReasonIsThatOfThisProcess) {
  const int port = free_port();
  const Listening server("127.0.0.1", port, 16);
  rlimit before = {};
  ::getrlimit(RLIMIT_NOFILE, &before);
  rlimit none = before;
  none.rlim_cur = 0;
  ::setrlimit(RLIMIT_NOFILE, &none);
  const int error = connect_to({"127.0.0.1"}, port, milliseconds(1000));
  Connection connection;
  std::string told, not_bound;
  try {
    connection.open("127.0.0.1", port, steady_clock::now() + milliseconds(1000));
  } catch (const Connection::NoSocket& problem) {
    told = problem.what();
  }
  try {
    bound_socket("127.0.0.1", 0, /*for_other_hosts=*/false);
  } catch (const CommunicationError& problem) {
    not_bound = problem.what();
  }
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_EQ(error, EMFILE);
  EXPECT_EQ(told, "this process cannot open a socket: Too many open files");
  EXPECT_EQ(not_bound, "127.0.0.1:0: cannot listen: Too many open files");
}

/// With a secret (wait_to_enter_store) and without one (wait_for_answer).
TEST(AHostWithoutAnAddress, IsToldAsTheReason) {
  const std::string host(64, 'a');  // a longer label than a name may have
  const auto now = steady_clock::now();
  const std::string reason = wait_for_answer(host, 1, "", "", now);
  EXPECT_EQ(
      wait_to_enter_store(host, 1, Secret("what all ranks know"), now, {}, [] { return false; }),
      reason);
  EXPECT_NE(reason, "");
  EXPECT_NE(reason, why_not_connected(EHOSTUNREACH));
}

/// A free port of the kind that the system gives to sockets that connect: it prefers even numbers
/// for one purpose, odd ones for the other.
int port_for_connections() {
  for (int tries = 0;; ++tries) {
    const testing::ReservedPort given;
    const int port = given.number() ^ 1;
    try {
      ::close(bound_socket("127.0.0.1", port, /*for_other_hosts=*/false));
      return port;
    } catch (const CommunicationError&) {  // another program has it
      if (tries == 100) throw;
    }
  }
}

/// Whether a socket that is not connected to itself has this port.
bool another_has(int port) {
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream lines(table);
    std::string line;
    std::getline(lines, line);  // the names of the columns
    while (std::getline(lines, line)) {
      std::istringstream words(line);
      std::string number, own, peer;
      words >> number >> own >> peer;  // as in 0100007F:D900
      if (own != peer && std::stoi(own.substr(own.find(':') + 1), nullptr, 16) == port) return true;
    }
  }
  return false;
}

/// The system may give a socket the very port to which it connects, after some thousand tries.
void expect_no_server_and_then_one(int port) {
  const auto start = steady_clock::now();
  for (int tries = 0; tries < 40'000 && steady_clock::now() - start < milliseconds(4000); ++tries)
    ASSERT_EQ(connect_to({"127.0.0.1"}, port, milliseconds(1000)), ECONNREFUSED) << tries;
  const Listening server("127.0.0.1", port, 16);
  EXPECT_EQ(connect_to({"127.0.0.1"}, port, milliseconds(1000)), 0);
}

TEST(ASocketThatConnectsToItself, IsNoServerAndLeavesThePortToOne) {
  for (int tries = 1;; ++tries) {
    const int port = port_for_connections();
    try {
      return expect_no_server_and_then_one(port);
    } catch (const CommunicationError& error) {
      // Nothing holds the port for the test, so another program may have taken it meanwhile.
      const bool in_use =
          std::string(error.what()).find("Address already in use") != std::string::npos;
      if (!in_use || !another_has(port) || tries == 5) throw;
    }
  }
}

TEST(AConnection, DoesNotKeepAServerFromTakingItsPort) {
  const int port = free_port();
  const Listening server("127.0.0.1", port, 16);
  int error = 0;
  const int client = connected_socket({"127.0.0.1"}, port, milliseconds(1000), &error);
  ASSERT_GE(client, 0) << error;
  sockaddr_in own = {};
  socklen_t size = sizeof own;
  ASSERT_EQ(::getsockname(client, reinterpret_cast<sockaddr*>(&own), &size), 0);
  const int its_port = ntohs(own.sin_port);
  const Listening second("127.0.0.1", its_port, 16);
  EXPECT_EQ(connect_to({"127.0.0.1"}, its_port, milliseconds(1000)), 0);
  ::close(client);
}

TEST(PeerAddress, KeepsTheScopeOfALinkLocalAddress) {
  for (const NetworkAddress& own : network_addresses()) {
    if (!own.address.starts_with("fe80:")) continue;
    const std::string scoped = own.address + "%" + own.interface;
    const Listening server(scoped, 0, 16);
    int error = 0;
    const int socket = connected_socket({scoped}, server.port(), milliseconds(10'000), &error);
    ASSERT_GE(socket, 0) << error;
    EXPECT_EQ(peer_address(socket), scoped);
    ::close(socket);
    return;
  }
  GTEST_SKIP() << "no interface has a link-local address";
}

}  // namespace
}  // namespace lockstep
