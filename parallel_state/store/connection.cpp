#include "lockstep/parallel_state/connection.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "lockstep/parallel_state/network.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

/// How often a step checks whether it was interrupted.
constexpr milliseconds kLongestPoll{100};

bool means_end(int error) { return error == ECONNRESET || error == EPIPE || error == ECONNREFUSED; }

int error_of(int socket) {
  int error = 0;
  socklen_t size = sizeof error;
  ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

}  // namespace

bool Connection::open(const std::string& host, int port, Deadline deadline) {
  const State now = state();
  if (now == State::ended) throw Ended("it has ended");
  if (now == State::open) return false;
  const auto left =
      std::chrono::duration_cast<milliseconds>(deadline - std::chrono::steady_clock::now());
  int error = 0;
  std::string no_address;
  const int connected = connected_socket({found_at_.empty() ? host : found_at_}, port,
                                         std::max(left, milliseconds(1)), &error, &no_address);
  if (!no_address.empty()) throw Silent(no_address);
  if (connected < 0 && lacks_descriptors(error)) throw NoSocket(why_not_connected(error));
  if (connected < 0) fail_step(error);
  // A request may follow one without an answer, whose acknowledgement it must not wait for.
  const int yes = 1;
  ::setsockopt(connected, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  found_at_ = peer_address(connected);
  const std::lock_guard<std::mutex> lock(mutex_);
  socket_ = connected;
  settled_ = false;
  return true;
}

void Connection::settle() {
  const std::lock_guard<std::mutex> lock(mutex_);
  settled_ = true;
}

void Connection::send(const std::string& bytes, Deadline deadline) {
  for (size_t sent = 0; sent < bytes.size();) {
    await(POLLOUT, deadline);
    const ssize_t now =
        ::send(socket(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (now < 0 && errno != EAGAIN && errno != EINTR) fail_step(errno);
    sent += static_cast<size_t>(std::max(now, ssize_t{0}));
  }
}

void Connection::receive(void* to, size_t bytes, Deadline deadline) {
  for (size_t received = 0; received < bytes;) {
    await(POLLIN, deadline);
    const ssize_t now =
        ::recv(socket(), static_cast<char*>(to) + received, bytes - received, MSG_DONTWAIT);
    if (now == 0) fail_step(ECONNRESET);
    if (now < 0 && errno != EAGAIN && errno != EINTR) fail_step(errno);
    received += static_cast<size_t>(std::max(now, ssize_t{0}));
  }
}

void Connection::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (socket_ >= 0) ::close(std::exchange(socket_, -1));
}

Connection::State Connection::state() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!ended_ && socket_ >= 0 && settled_) {
    pollfd poll = {.fd = socket_, .events = POLLRDHUP, .revents = 0};
    if (::poll(&poll, 1, 0) > 0) {
      const bool has_error = (poll.revents & POLLERR) != 0;
      if (has_error) broken_ = !means_end(error_of(socket_));
      ended_ = !broken_ && poll.revents != 0;
    }
  }
  return ended_ ? State::ended : socket_ >= 0 ? State::open : State::none;
}

void Connection::interrupt() {
  const std::lock_guard<std::mutex> lock(mutex_);
  interrupted_ = true;
}

int Connection::socket() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (interrupted_) throw Ended("interrupted");
  return socket_;
}

void Connection::await(short events, Deadline deadline) {
  for (;;) {
    pollfd poll = {.fd = socket(), .events = events, .revents = 0};
    const auto left =
        std::chrono::duration_cast<milliseconds>(deadline - std::chrono::steady_clock::now());
    const auto patience = std::clamp(left, milliseconds(0), kLongestPoll);
    if (::poll(&poll, 1, static_cast<int>(patience.count())) > 0) return;
    if (left <= milliseconds(0)) fail_step(ETIMEDOUT);
  }
}

void Connection::fail_step(int error) {
  bool ended = means_end(error), turned_away = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ended = ended && !std::exchange(broken_, false);
    turned_away = ended && socket_ >= 0 && !settled_;
    ended_ = ended_ || (ended && !turned_away);
    if (socket_ >= 0) ::close(std::exchange(socket_, -1));
  }
  if (turned_away) throw TurnedAway(std::strerror(error));
  if (ended) throw Ended(std::strerror(error));
  throw Silent(std::strerror(error));
}

}  // namespace lockstep
