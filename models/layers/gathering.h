#pragma once

// Internal.

#include <string>

#include <ATen/ATen.h>

#include "lockstep/models/linear_function.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {

/// The chunks of all ranks, joined along dimension 0, once the work is done.
struct Gathering {
  at::Tensor whole;
  Work work;

  Gathering(const at::Tensor& chunk, const ParallelLinearOptions& options,
            const std::string& label) {
    std::vector<int64_t> shape = chunk.sizes().vec();
    shape[0] *= options.group.size();
    whole = at::empty(shape, chunk.options());
    work = all_gather(options.group, whole, chunk.detach().contiguous(), label);
  }
};

}  // namespace lockstep
