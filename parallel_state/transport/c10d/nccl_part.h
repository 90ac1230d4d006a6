#pragma once

// Internal: the CUDA part of parallel_state/.

#include "lockstep/parallel_state/backends.h"

namespace lockstep {

struct NcclPart {
  c10::intrusive_ptr<c10d::Backend> (*make_backend)(const BackendSpec& spec) = nullptr;
  int (*device_count)() = nullptr;
  std::string (*version)() = nullptr;
  c10::intrusive_ptr<c10d::Work> (*work_without_outputs)(const c10d::Work& work) = nullptr;
};

/// A work for the same NCCL operation that keeps none of its outputs; null for works that are not
/// NCCL's.
c10::intrusive_ptr<c10d::Work> nccl_work_without_outputs(const c10d::Work& work);

}  // namespace lockstep
