#include "lockstep/parallel_state/network.h"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

namespace lockstep {
namespace {

constexpr size_t kLongestName = 256;

/// "10.0.0.1"; empty for what is no internet address.
std::string numeric(const sockaddr* address) {
  if (!address || (address->sa_family != AF_INET && address->sa_family != AF_INET6)) return "";
  const socklen_t size = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  char text[kLongestName];
  if (getnameinfo(address, size, text, sizeof text, nullptr, 0, NI_NUMERICHOST) != 0) return "";
  const std::string with_scope = text;
  return with_scope.substr(0, with_scope.find('%'));
}

std::string resolve(const std::string& name) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(name.c_str(), nullptr, &hints, &found) != 0) return "";
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  return numeric(found->ai_addr);
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
  char name[kLongestName] = {};
  gethostname(name, sizeof name - 1);
  const std::string address = resolve(name);
  const auto found = std::find_if(addresses.begin(), addresses.end(),
                                  [&](const auto& a) { return a.address == address; });
  if (found == addresses.end()) return {"lo", "127.0.0.1", "loopback"};
  return {found->interface, address, std::string("host name ") + name};
}

}  // namespace lockstep
