#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// A contiguous tensor of zeros that lives long and is traversed as a whole: a buffer of parameters
/// or gradients, the state of an optimizer, a weight. On the CPU, from 2 MiB on, it begins with a
/// huge page, and the kernel is asked to back it with huge pages (Linux's transparent huge pages,
/// if not set to "never"): a pass over ordinary pages spends part of its time looking them up. The
/// last huge page is whole if that costs at most a sixteenth of the tensor's bytes. The kernel
/// provides each page, with zeros, when it is first written or read; there is no pass over the
/// tensor before that. A program that has set a CPU allocator of its own gets its memory from that
/// allocator. c10::Error: no memory.
at::Tensor flat_zeros(at::IntArrayRef sizes, const at::TensorOptions& options);
inline at::Tensor flat_zeros(int64_t numel, const at::TensorOptions& options) {
  return flat_zeros(at::IntArrayRef(numel), options);
}

}  // namespace lockstep
