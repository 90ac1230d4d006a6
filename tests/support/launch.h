#pragma once

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include "lockstep/parallel_state/launch_environment.h"
#include "lockstep/parallel_state/network.h"

namespace lockstep::testing {

/// A port of the loopback interface that nobody listens at.
inline int free_port() {
  const int descriptor = bound_socket("127.0.0.1", 0, /*for_other_hosts=*/false);
  sockaddr_in address = {};
  socklen_t size = sizeof address;
  ::getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &size);
  ::close(descriptor);
  return ntohs(address.sin_port);
}

/// What torchrun tells one of `world` ranks of a host, where rank 0 serves the store at `port`.
inline LaunchEnvironment environment_of(int rank, int world, int port) {
  LaunchEnvironment environment;
  environment.launcher = Launcher::torchrun;
  environment.rank = environment.local_rank = rank;
  environment.world_size = environment.local_world_size = world;
  environment.master_port = port;
  return environment;
}

}  // namespace lockstep::testing
