#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// A one-dimensional tensor of `numel` zeros that lives long and is passed over as a whole: a
/// buffer of parameters or gradients, the state of an optimizer. On the CPU, from 2 MiB on, it
/// begins with a huge page, and the kernel is asked to back it with these (Linux's transparent huge
/// pages, if not set to "never"): a pass over ordinary pages spends a part of its time looking them
/// up. The last huge page is whole where that costs at most a sixteenth of the tensor's bytes. A
/// program that has set a CPU allocator of its own gets its memory from that. c10::Error: no
/// memory.
at::Tensor flat_zeros(int64_t numel, const at::TensorOptions& options);

}  // namespace lockstep
