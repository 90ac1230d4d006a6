#pragma once

// Internal: the only place that creates c10d backends.

#include <chrono>
#include <string>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "lockstep/parallel_state/group_options.h"

namespace lockstep {

/// The data that a backend needs about its group.
struct BackendSpec {
  c10::intrusive_ptr<c10d::Store> store;  ///< with keys of this group only
  std::string group_name;
  std::vector<int64_t> ranks;  ///< global ranks, in group order
  int rank = 0;                ///< position of this rank in the group
  std::chrono::milliseconds timeout{};
  /// All ranks run on one host, so Gloo listens on the loopback interface alone. Otherwise Gloo
  /// uses GLOO_SOCKET_IFNAME or, if that is not set, the interface of the host's name.
  bool single_host = true;
  GroupOptions options = {};  ///< for NCCL; `timeout` above takes precedence
};

/// Gloo, for CPU tensors. Connects to all ranks of the group, within the timeout even if one of
/// them leaves meanwhile.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const BackendSpec& spec);

/// NCCL, for CUDA tensors. ConfigError if CUDA is not loaded, see cuda_libraries.h.
c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendSpec& spec);

}  // namespace lockstep
