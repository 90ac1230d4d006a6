#include "lockstep/parallel_state/cpu_transport.h"
#include "lockstep/parallel_state/gloo_transport.h"

namespace lockstep {

TransportMaker cpu_transport(bool /*observed*/) {
  return [](const auto& group, std::chrono::milliseconds timeout) {
    return std::make_unique<GlooTransport>(group, timeout);
  };
}

}  // namespace lockstep
