#include "lockstep/parallel_state/network.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

constexpr size_t kLongestName = 256;

/// "10.0.0.1"; empty if it is no internet address.
std::string numeric(const sockaddr* address) {
  if (!address || (address->sa_family != AF_INET && address->sa_family != AF_INET6)) return "";
  const socklen_t size = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  char text[kLongestName];
  if (getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) return "";
  const std::string with_scope = text;
  return with_scope.substr(0, with_scope.find('%'));
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
  explicit Socket(const addrinfo& address)
      : descriptor_(::socket(address.ai_family, address.ai_socktype | SOCK_CLOEXEC, 0)) {}
  ~Socket() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;

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

/// After `patience`, connecting, sending and receiving fail with EINPROGRESS or EAGAIN.
void limit_steps(const Socket& socket, std::chrono::milliseconds patience) {
  const timeval limit = {.tv_sec = patience.count() / 1000,
                         .tv_usec = patience.count() % 1000 * 1000};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
}

/// Empty if one of the addresses gives the answer; otherwise the reason.
std::string ask(const addrinfo* addresses, const std::string& request, const std::string& answer,
                std::chrono::milliseconds patience,
                const std::function<void(const std::string&)>& other_answer) {
  std::string reason = "it has no address";
  for (const addrinfo* at = addresses; at; at = at->ai_next) {
    const Socket socket(*at);
    limit_steps(socket, patience);
    if (::connect(socket.get(), at->ai_addr, at->ai_addrlen) != 0) {
      reason = std::strerror(errno);
    } else if (request.empty()) {
      return "";
    } else {
      const std::string received = answer_to(socket.get(), request, answer.size());
      if (received == answer) return "";
      if (other_answer) other_answer(received);
      reason = "whoever listens there does not answer as it should";
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
    const int yes = 1;
    ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (::bind(socket.get(), at->ai_addr, at->ai_addrlen) == 0) return socket.release();
    reason = std::strerror(errno);
    if (errno == EADDRINUSE) break;
  }
  fail<CommunicationError>("{}:{} cannot be listened at: {}", host, port, reason);
}

int connected_socket(const std::string& host, int port, std::chrono::milliseconds patience,
                     int* error) {
  *error = EHOSTUNREACH;
  const Addresses addresses = resolve(host, port);
  for (const addrinfo* at = addresses.get(); at; at = at->ai_next) {
    Socket socket(*at);
    limit_steps(socket, patience);
    if (::connect(socket.get(), at->ai_addr, at->ai_addrlen) == 0) return socket.release();
    *error = errno;
  }
  return -1;
}

std::string peer_address(int socket) {
  sockaddr_storage address = {};
  socklen_t size = sizeof address;
  auto* const plain = reinterpret_cast<sockaddr*>(&address);
  return ::getpeername(socket, plain, &size) == 0 ? numeric(plain) : "";
}

std::string wait_for_answer(const std::string& host, int port, const std::string& request,
                            const std::string& answer,
                            std::chrono::steady_clock::time_point deadline,
                            const std::function<bool()>& give_up,
                            const std::function<void(const std::string&)>& other_answer) {
  using std::chrono::milliseconds;
  constexpr milliseconds kPause{20}, kLeast{10}, kMost{2000};
  for (;;) {
    const auto left =
        std::chrono::duration_cast<milliseconds>(deadline - std::chrono::steady_clock::now());
    std::string reason;
    const Addresses addresses = resolve(host, port, &reason);
    if (addresses)
      reason = ask(addresses.get(), request, answer, std::clamp(left, kLeast, kMost), other_answer);
    if (reason.empty() || std::chrono::steady_clock::now() >= deadline || (give_up && give_up()))
      return reason;
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace lockstep
