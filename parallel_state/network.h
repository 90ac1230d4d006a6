#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// One address of this host.
struct NetworkAddress {
  std::string interface;
  std::string address;  ///< IPv4 or IPv6
};

/// The addresses of all interfaces that are up.
std::vector<NetworkAddress> network_addresses();

/// Where Gloo listens in a job of several hosts.
struct GlooAddress {
  std::string interface;  ///< empty if no interface has the address
  std::string address;    ///< empty if there is none
  std::string reason;     ///< "GLOO_SOCKET_IFNAME", "host name NAME", "loopback"
};

/// GLOO_SOCKET_IFNAME's interface where that is set; else the one that the host's name leads to;
/// else loopback. (On one host the ranks meet on loopback in any case.)
GlooAddress gloo_address();

}  // namespace lockstep
