#include "lockstep/parallel_state/closed_store.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

constexpr uint64_t kListener = 0, kStop = 1, kFirstGuest = 2;
constexpr int kBacklog = 4096;
constexpr int kAtOnce = 64;              // events
constexpr size_t kMostUnsent = 1 << 20;  // bytes; then the guest must read before it asks again
constexpr milliseconds kPause{50};

bool other_end_has_left(int socket) {
  pollfd poll = {.fd = socket, .events = POLLRDHUP, .revents = 0};
  return ::poll(&poll, 1, 0) > 0;
}

bool means_left(int error) { return error == ECONNRESET || error == EPIPE; }

}  // namespace

ClosedStore::ClosedStore(int bound, std::shared_ptr<const Secret> secret, DoorLimits limits)
    : listener_(bound),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      secret_(std::move(secret)),
      limits_(limits),
      next_(kFirstGuest) {
  if (epoll_ < 0 || stop_ < 0 || ::listen(listener_, kBacklog) != 0) {
    const int error = errno;
    close_descriptors();  // no destructor will
    fail<CommunicationError>("cannot listen: {}", std::strerror(error));
  }
  ::fcntl(listener_, F_SETFL, O_NONBLOCK);
  watch(EPOLL_CTL_ADD, listener_, EPOLLIN, kListener);
  watch(EPOLL_CTL_ADD, stop_, EPOLLIN, kStop);
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    close_descriptors();
    fail<CommunicationError>("cannot listen: {}", error.what());
  }
}

void ClosedStore::close() {
  if (!thread_.joinable()) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(stop_, &one, sizeof one);
  thread_.join();
  while (!guests_.empty()) leave(guests_.begin()->first);
  close_descriptors();
}

void ClosedStore::close_descriptors() const {
  for (const int descriptor : {listener_, epoll_, stop_})
    if (descriptor >= 0) ::close(descriptor);
}

void ClosedStore::watch(int operation, int socket, uint32_t events, Number number) const {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = number;
  ::epoll_ctl(epoll_, operation, socket, &event);
}

void ClosedStore::run() {
  std::array<epoll_event, kAtOnce> events;
  for (;;) {
    const int ready = ::epoll_wait(epoll_, events.data(), kAtOnce, milliseconds_to_wait());
    for (int i = 0; i < ready; ++i) {
      const Number number = events[static_cast<size_t>(i)].data.u64;
      if (number == kStop) return;
      if (number == kListener) accept_one();
      const auto guest = guests_.find(number);
      if (guest == guests_.end()) continue;  // the listener, or closed meanwhile to make room
      if (!serve(guest->first, guest->second)) leave(guest->first);
    }
    close_late();
  }
}

int ClosedStore::milliseconds_to_wait() const {
  auto until = Clock::time_point::max();
  if (!waiting_.empty()) until = guests_.at(*waiting_.begin()).came + limits_.patience;
  if (listens_again_ != Clock::time_point()) until = std::min(until, listens_again_);
  if (until == Clock::time_point::max()) return -1;
  const auto left = std::chrono::ceil<milliseconds>(until - Clock::now()).count();
  return static_cast<int>(std::max<int64_t>(left, 0));
}

/// Only one, and only if one has come: without a descriptor accept4 fails even if no client waits.
void ClosedStore::accept_one() {
  const int socket = ::accept4(listener_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (socket >= 0) return welcome(socket);
  if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) return;
  if (!std::exchange(told_of_obstacle_, true))
    std::fprintf(stderr, "lockstep: the store cannot accept connections: %s\n",
                 std::strerror(errno));
  if (!waiting_.empty()) return leave(*waiting_.begin());
  listens_again_ = Clock::now() + kPause;
  watch(EPOLL_CTL_MOD, listener_, 0, kListener);
}

void ClosedStore::welcome(int socket) {
  if (other_end_has_left(socket)) {
    ::close(socket);
    return;
  }
  const int yes = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  if (waiting_.size() >= limits_.waiting) leave(*waiting_.begin());
  const Number number = next_++;
  Guest& guest = guests_[number];
  guest.socket = socket;
  guest.came = Clock::now();
  guest.out = guest.proof.greeting();
  waiting_.insert(number);
  watch(EPOLL_CTL_ADD, socket, EPOLLIN, number);
  if (!serve(number, guest)) leave(number);
}

void ClosedStore::close_late() {
  const auto now = Clock::now();
  while (!waiting_.empty() && guests_.at(*waiting_.begin()).came + limits_.patience <= now)
    leave(*waiting_.begin());
  if (listens_again_ == Clock::time_point() || now < listens_again_) return;
  listens_again_ = {};
  watch(EPOLL_CTL_MOD, listener_, EPOLLIN, kListener);
}

void ClosedStore::leave(Number number) {
  const auto guest = guests_.find(number);
  const bool refuses = guest->second.spoke || !guest->second.left;
  ::close(guest->second.socket);
  guests_.erase(guest);
  if (waiting_.erase(number) == 0 || !refuses) return;
  ++refused_;
  values_.set(std::string("/") + kRefusedConnections, std::to_string(refused_));
}

/// A guest is read only after it has taken all answers, so that they cannot pile up.
bool ClosedStore::serve(Number number, Guest& guest) {
  if (guest.out.empty() && !receive(guest)) return false;
  if (!guest.proved && !check_proof(number, guest)) return false;
  if (!send(guest)) return false;
  while (guest.proved && guest.out.empty()) {
    if (!answer_requests(guest)) return false;
    if (guest.out.empty()) break;
    if (!send(guest)) return false;
  }
  const bool reads = guest.out.empty();
  if (reads != guest.reads) watch(EPOLL_CTL_MOD, guest.socket, reads ? EPOLLIN : EPOLLOUT, number);
  guest.reads = reads;
  return true;
}

/// From a stranger, reads no more bytes than an answer has.
bool ClosedStore::receive(Guest& guest) {
  const size_t most = guest.proved ? buffer_.size() : kAnswerBytes - guest.in.size();
  const ssize_t received = ::recv(guest.socket, buffer_.data(), most, 0);
  guest.spoke = guest.spoke || received > 0;
  guest.left = received == 0 || (received < 0 && means_left(errno));
  if (received < 0) return errno == EAGAIN || errno == EINTR;
  guest.in.append(buffer_.data(), static_cast<size_t>(received));
  return received > 0;
}

bool ClosedStore::check_proof(Number number, Guest& guest) {
  if (!ProofOfClient::may_be_answer(guest.in)) return false;
  if (guest.in.size() < kAnswerBytes) return true;
  const auto verdict = guest.proof.verdict(*secret_, guest.in);
  guest.in.clear();
  guest.proved = verdict.has_value();
  guest.out += verdict.value_or(std::string(1, kProofFails));
  if (guest.proved)
    waiting_.erase(number);
  else
    send(guest);
  return guest.proved;
}

bool ClosedStore::answer_requests(Guest& guest) {
  StoreRequest request;
  size_t done = 0;
  while (guest.out.size() < kMostUnsent) {
    const auto outcome = request.read(std::string_view(guest.in).substr(done));
    if (outcome == StoreRequest::Outcome::incomplete) break;
    if (outcome == StoreRequest::Outcome::unreadable) return false;
    if (!values_.answer(request, guest.out)) return false;
    done += request.size;
  }
  guest.in.erase(0, done);
  return true;
}

std::string refused_connections(int64_t number) {
  return fmt::format("{} connection{} without the secret {} refused", number,
                     number == 1 ? "" : "s", number == 1 ? "was" : "were");
}

bool ClosedStore::send(Guest& guest) {
  if (guest.out.empty()) return true;
  const ssize_t sent = ::send(guest.socket, guest.out.data(), guest.out.size(), MSG_NOSIGNAL);
  guest.left = sent < 0 && means_left(errno);
  if (sent < 0) return errno == EAGAIN || errno == EINTR;
  guest.out.erase(0, static_cast<size_t>(sent));
  return true;
}

}  // namespace lockstep
