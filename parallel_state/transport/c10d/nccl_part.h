#pragma once

// Internal: the CUDA part of parallel_state/.

#include "lockstep/parallel_state/backends.h"

namespace lockstep {

struct NcclPart {
  c10::intrusive_ptr<c10d::Backend> (*make_backend)(const BackendSpec& spec) = nullptr;
  int (*device_count)() = nullptr;
  std::string (*version)() = nullptr;
};

}  // namespace lockstep
