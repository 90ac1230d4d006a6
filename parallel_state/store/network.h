#pragma once

#include <chrono>
#include <functional>
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

/// The address at which Gloo listens in a job of several hosts.
struct GlooAddress {
  std::string interface;  ///< empty if no interface has the address
  std::string address;    ///< empty if there is none
  std::string reason;     ///< "GLOO_SOCKET_IFNAME", "host name NAME", "loopback"
};

/// GLOO_SOCKET_IFNAME's interface if that is set; otherwise the one that the host's name resolves
/// to; otherwise loopback. (On one host the ranks meet on loopback in any case.)
GlooAddress gloo_address();

/// "HOST:PID" of this process, for messages.
std::string process_name();

/// A TCP socket that is bound to `port` of the address that `host` resolves to, and to no other
/// address; it does not listen yet. The caller owns it. Between several hosts (`for_other_hosts`) a
/// loopback address is skipped. CommunicationError names address and port and the reason: in use,
/// or not an address of this host.
int bound_socket(const std::string& host, int port, bool for_other_hosts);

/// A connection to a port of one of the hosts; -1, and an errno in `error`, if there is none after
/// `patience`. The caller owns it. All addresses of the hosts are tried, in their order: the next
/// one as soon as those before it have failed, or after 250 ms at most. The first that connects is
/// taken. Only looking up a name may take longer than `patience`. The error is ETIMEDOUT if an
/// address has not answered, otherwise that of the last one that failed. A socket that the system
/// connects to itself, because it gave it that port, counts as refused. If no host has an address,
/// the error is EHOSTUNREACH and `no_address`, if it is given, is why the last one has none. The
/// connection does not keep bound_socket() from taking its port.
int connected_socket(const std::vector<std::string>& hosts, int port,
                     std::chrono::milliseconds patience, int* error,
                     std::string* no_address = nullptr);

/// Whether such an error means that this process, or its host, has no descriptor left.
bool lacks_descriptors(int error);
/// That error in words; says so if it is this process that cannot open a socket.
std::string why_not_connected(int error);

/// The address of the other end of a connection, "10.0.0.1" or, with the scope that a link-local
/// address needs, "fe80::1%eth0".
std::string peer_address(int socket);

/// Waits until a server at host:port answers `request` with exactly `answer`; if both are empty,
/// until one listens there. Returns nothing then, or why that did not happen before `deadline` or
/// before `give_up`, which is called repeatedly, said to stop. `other_answer` is called with any
/// other answer. All addresses of the host are asked in turn, which share up to 2 s.
std::string wait_for_answer(const std::string& host, int port, const std::string& request,
                            const std::string& answer,
                            std::chrono::steady_clock::time_point deadline,
                            const std::function<bool()>& give_up = {},
                            const std::function<void(const std::string&)>& other_answer = {});

}  // namespace lockstep
