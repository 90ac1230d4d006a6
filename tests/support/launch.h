#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <deque>
#include <mutex>

#include "lockstep/parallel_state/launch_environment.h"
#include "lockstep/parallel_state/network.h"

namespace lockstep::testing {

/// A port of the loopback interface on which nobody listens, and which programs that run at the
/// same time do not get. Rank 0 can listen on it: both sockets have SO_REUSEADDR, and this one does
/// not listen.
class ReservedPort {
 public:
  ReservedPort() : socket_(bound_socket("127.0.0.1", 0, /*for_other_hosts=*/false)) {
    sockaddr_in address = {};
    socklen_t size = sizeof address;
    ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size);
    number_ = ntohs(address.sin_port);
  }
  ~ReservedPort() { ::close(socket_); }
  ReservedPort(const ReservedPort&) = delete;
  ReservedPort& operator=(const ReservedPort&) = delete;

  int number() const { return number_; }

 private:
  int socket_, number_;
};

/// The number of a ReservedPort that lives until the program ends.
inline int free_port() {
  static std::mutex mutex;
  static std::deque<ReservedPort> ports;
  const std::lock_guard lock(mutex);
  return ports.emplace_back().number();
}

/// The environment that torchrun gives one of `world` ranks on a host. Rank 0 serves the store at
/// `port`.
inline LaunchEnvironment environment_of(int rank, int world, int port) {
  LaunchEnvironment environment;
  environment.launcher = Launcher::torchrun;
  environment.rank = environment.local_rank = rank;
  environment.world_size = environment.local_world_size = world;
  environment.master_port = port;
  return environment;
}

}  // namespace lockstep::testing
