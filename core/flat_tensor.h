#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// A one-dimensional tensor of `numel` zeros that lives long and is passed over as a whole: a
/// buffer of parameters or gradients, the state of an optimizer. On the CPU the kernel is asked to
/// back it with huge pages where that costs no memory (Linux's transparent huge pages, if not set
/// to "never"): a pass over ordinary pages spends a part of its time looking them up.
at::Tensor flat_zeros(int64_t numel, const at::TensorOptions& options);

}  // namespace lockstep
