#include "lockstep/parallel_state/rendezvous.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/core/check.h"

namespace lockstep {

c10::intrusive_ptr<c10d::Store> connect_store(const LaunchEnvironment& environment,
                                              std::chrono::milliseconds timeout) {
  if (environment.world_size == 1) return nullptr;
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(environment.master_port);
  options.isServer = environment.rank == 0 && !environment.agent_serves_store;
  options.waitWorkers = false;
  options.timeout = timeout;
  try {
    auto store = c10::make_intrusive<c10d::TCPStore>(environment.master_address, options);
    return c10::make_intrusive<c10d::PrefixStore>("lockstep", store);
  } catch (const c10::Error& error) {
    fail<CommunicationError>("rank {} cannot {} the store at {}:{} ({}): {}", environment.rank,
                             options.isServer ? "serve" : "reach", environment.master_address,
                             environment.master_port, to_string(environment.launcher),
                             error.what_without_backtrace());
  }
}

}  // namespace lockstep
