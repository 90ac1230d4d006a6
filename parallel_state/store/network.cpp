#include "lockstep/parallel_state/network.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr size_t kLongestName = 256;

/// "10.0.0.1", "fe80::1%eth0"; empty if it is no internet address.
std::string numeric_with_scope(const sockaddr* address) {
  if (!address || (address->sa_family != AF_INET && address->sa_family != AF_INET6)) return "";
  const socklen_t size = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  char text[kLongestName];
  if (getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) return "";
  return text;
}

std::string numeric(const sockaddr* address) {
  const std::string text = numeric_with_scope(address);
  return text.substr(0, text.find('%'));
}

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

/// The addresses of a name; null, and the reason, if it has none.
Addresses resolve(const std::string& name, int port, std::string* reason = nullptr) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(name.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0 && reason) *reason = gai_strerror(error);
  return {error == 0 ? found : nullptr, freeaddrinfo};
}

std::string host_name() {
  char name[kLongestName] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

bool is_loopback(const sockaddr* address) {
  const std::string text = numeric(address);
  return text == "::1" || text.starts_with("127.");
}

/// A file descriptor that closes itself.
class Socket {
 public:
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  explicit Socket(const addrinfo& address, int flags = 0)
      : Socket(::socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC | flags, 0)) {}
  ~Socket() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  Socket(Socket&& other) noexcept : descriptor_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }

  int get() const { return descriptor_; }
  int release() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_;
};

/// The answer of the other end: as many bytes as wanted, or fewer.
std::string answer_to(int socket, const std::string& request, size_t bytes) {
  if (::send(socket, request.data(), request.size(), MSG_NOSIGNAL) < 0) return "";
  std::string received(bytes, '\0');
  const ssize_t size = ::recv(socket, received.data(), received.size(), MSG_WAITALL);
  received.resize(static_cast<size_t>(std::max(size, ssize_t{0})));
  return received;
}

/// After `patience`, sending and receiving fail with EAGAIN.
void limit_steps(const Socket& socket, milliseconds patience) {
  patience = std::max(patience, milliseconds(1));  // 0 would mean no limit
  const timeval limit = {.tv_sec = patience.count() / 1000,
                         .tv_usec = patience.count() % 1000 * 1000};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
}

milliseconds time_until(Clock::time_point when) {
  const auto left = std::chrono::ceil<milliseconds>(when - Clock::now());
  return std::clamp(left, milliseconds(0), milliseconds(INT_MAX));
}

/// A socket that connects to a port on which nobody listens may get that very port as its own.
bool is_connected_to_itself(const Socket& socket) {
  sockaddr_storage own = {}, peer = {};
  socklen_t own_size = sizeof own, peer_size = sizeof peer;
  return ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &own_size) == 0 &&
         ::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0 &&
         own_size == peer_size && std::memcmp(&own, &peer, own_size) == 0;
}

/// For bind() this socket's port counts as taken only by others that lack it, or that listen.
void share_port(const Socket& socket) {
  const int yes = 1;
  ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
}

/// The sockets that are connecting at the same time.
class ConnectionRace {
 public:
  void start(const addrinfo& address) {
    Socket socket(address, SOCK_NONBLOCK);
    if (socket.get() < 0) {  // connect() would replace the reason with EBADF
      error_ = errno;
      return;
    }
    share_port(socket);
    if (::connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0 || errno == EINPROGRESS)
      sockets_.push_back(std::move(socket));
    else
      error_ = errno;
  }

  /// The first that connects by `until`; -1 if all fail or none does.
  int wait(Clock::time_point until) {
    while (!sockets_.empty()) {
      std::vector<pollfd> polls;
      for (const Socket& socket : sockets_)
        polls.push_back({.fd = socket.get(), .events = POLLOUT, .revents = 0});
      const int ready =
          ::poll(polls.data(), polls.size(), static_cast<int>(time_until(until).count()));
      if (ready == 0) return -1;
      std::vector<Socket> others;
      for (size_t i = 0; i < polls.size(); ++i) {
        Socket& socket = sockets_[i];
        if (ready < 0 || polls[i].revents == 0)
          others.push_back(std::move(socket));
        else if (has_connected(socket))
          return socket.release();
      }
      sockets_ = std::move(others);
    }
    return -1;
  }

  /// Why no socket has connected.
  int error() const { return sockets_.empty() ? error_ : ETIMEDOUT; }

 private:
  bool has_connected(const Socket& socket) {
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error == 0 && is_connected_to_itself(socket)) error = ECONNREFUSED;
    if (error != 0) error_ = error;
    return error == 0;
  }

  std::vector<Socket> sockets_;
  int error_ = EHOSTUNREACH;
};

using AddressList = std::vector<const addrinfo*>;

void append(AddressList& list, const Addresses& addresses) {
  for (const addrinfo* at = addresses.get(); at; at = at->ai_next) list.push_back(at);
}

/// Each address is tried a moment after the one before it, which goes on: one that drops packets
/// holds up no other.
Socket first_connected(const AddressList& addresses, Clock::time_point deadline, int* error) {
  constexpr Clock::duration kHeadStart = milliseconds(250);
  ConnectionRace race;
  for (size_t i = 0; i < addresses.size(); ++i) {
    race.start(*addresses[i]);
    const auto now = Clock::now();
    const auto share = (deadline - now) / static_cast<int64_t>(addresses.size() - i);
    const bool is_last = i + 1 == addresses.size();
    const int socket = race.wait(is_last ? deadline : now + std::min(share, kHeadStart));
    if (socket < 0) continue;
    ::fcntl(socket, F_SETFL, ::fcntl(socket, F_GETFL) & ~O_NONBLOCK);
    return Socket(socket);
  }
  *error = race.error();
  return Socket(-1);
}

/// Empty if one of the addresses gives the answer; otherwise the reason.
std::string ask(const AddressList& addresses, const std::string& request, const std::string& answer,
                Clock::time_point deadline,
                const std::function<void(const std::string&)>& other_answer) {
  std::string reason = "it has no address";
  for (size_t i = 0; i < addresses.size(); ++i) {
    const auto now = Clock::now();
    const auto until = now + (deadline - now) / static_cast<int64_t>(addresses.size() - i);
    int error = 0;
    const Socket socket = first_connected({addresses[i]}, until, &error);
    if (socket.get() < 0) {
      reason = why_not_connected(error);
    } else if (request.empty()) {
      return "";
    } else {
      limit_steps(socket, time_until(until));
      const std::string received = answer_to(socket.get(), request, answer.size());
      if (received == answer) return "";
      if (other_answer) other_answer(received);
      reason = "the process listening there gave an unexpected answer";
    }
  }
  return reason;
}

}  // namespace

std::vector<NetworkAddress> network_addresses() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return {};
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(first, freeifaddrs);
  std::vector<NetworkAddress> addresses;
  for (const ifaddrs* entry = first; entry; entry = entry->ifa_next)
    if (const std::string address = numeric(entry->ifa_addr);
        !address.empty() && (entry->ifa_flags & IFF_UP))
      addresses.push_back({entry->ifa_name, address});
  return addresses;
}

GlooAddress gloo_address() {
  const auto addresses = network_addresses();
  if (const char* const chosen = std::getenv("GLOO_SOCKET_IFNAME")) {
    const auto found = std::find_if(addresses.begin(), addresses.end(),
                                    [&](const auto& a) { return a.interface == chosen; });
    return {chosen, found == addresses.end() ? "" : found->address, "GLOO_SOCKET_IFNAME"};
  }
  const std::string name = host_name();
  const Addresses resolved = resolve(name, 0);
  const std::string address = resolved ? numeric(resolved->ai_addr) : "";
  const auto found = std::find_if(addresses.begin(), addresses.end(),
                                  [&](const auto& a) { return a.address == address; });
  if (found == addresses.end()) return {"lo", "127.0.0.1", "loopback"};
  return {found->interface, address, "host name " + name};
}

bool lacks_descriptors(int error) { return error == EMFILE || error == ENFILE; }

std::string process_name() { return host_name() + ":" + std::to_string(::getpid()); }

int bound_socket(const std::string& host, int port, bool for_other_hosts) {
  std::string reason;
  const Addresses addresses = resolve(host, port, &reason);
  for (const addrinfo* at = addresses.get(); at; at = at->ai_next) {
    if (for_other_hosts && is_loopback(at->ai_addr)) {
      reason = "it is a loopback address, which other hosts cannot reach";
      continue;
    }
    Socket socket(*at);
    if (socket.get() >= 0) {  // bind() would replace the reason with EBADF
      share_port(socket);
      if (::bind(socket.get(), at->ai_addr, at->ai_addrlen) == 0) return socket.release();
    }
    reason = std::strerror(errno);
    if (errno == EADDRINUSE) break;
  }
  fail<CommunicationError>("{}:{}: cannot listen: {}", host, port, reason);
}

int connected_socket(const std::vector<std::string>& hosts, int port, milliseconds patience,
                     int* error, std::string* no_address) {
  std::vector<Addresses> resolved;
  AddressList addresses;
  std::string reason;
  for (const std::string& host : hosts)
    append(addresses, resolved.emplace_back(resolve(host, port, &reason)));
  if (addresses.empty() && no_address) *no_address = reason;
  Socket socket = first_connected(addresses, Clock::now() + patience, error);
  if (socket.get() >= 0) limit_steps(socket, patience);
  return socket.release();
}

std::string why_not_connected(int error) {
  const std::string text = std::strerror(error);
  return lacks_descriptors(error) ? "this process cannot open a socket: " + text : text;
}

std::string peer_address(int socket) {
  sockaddr_storage address = {};
  socklen_t size = sizeof address;
  auto* const plain = reinterpret_cast<sockaddr*>(&address);
  return ::getpeername(socket, plain, &size) == 0 ? numeric_with_scope(plain) : "";
}

std::string wait_for_answer(const std::string& host, int port, const std::string& request,
                            const std::string& answer, Clock::time_point deadline,
                            const std::function<bool()>& give_up,
                            const std::function<void(const std::string&)>& other_answer) {
  constexpr milliseconds kPause{20}, kLeast{10}, kMost{2000};
  for (;;) {
    std::string reason;
    const Addresses resolved = resolve(host, port, &reason);
    if (resolved) {
      AddressList addresses;
      append(addresses, resolved);
      const auto now = Clock::now();
      const auto until = std::clamp(deadline, now + kLeast, now + kMost);
      reason = ask(addresses, request, answer, until, other_answer);
    }
    if (reason.empty() || Clock::now() >= deadline || (give_up && give_up())) return reason;
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace lockstep
