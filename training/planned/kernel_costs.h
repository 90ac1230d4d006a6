#pragma once

// Internal.

#include <memory>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// While it lives, operators that this thread runs on tensors of the planned device are reported as
/// kernels to the PlannedHost of the thread.
///
/// Bytes are those of the operator's tensors on the device: inputs are read, results and what the
/// operator changes are written, each tensor once; an expanded tensor counts with its memory. A
/// lookup reads as much as it writes. Views and empty tensors cost nothing, and an operator that is
/// made of others counts as those. Flops are 2 m n k for each product of matrices of m x k and k x
/// n elements; fused attention over sequences of s and t tokens has 4 s t operations in forward for
/// each channel of each head, and 10 s t in backward, half of that if it is causal.
class KernelObserver {
 public:
  KernelObserver();
  ~KernelObserver();
  KernelObserver(const KernelObserver&) = delete;
  KernelObserver& operator=(const KernelObserver&) = delete;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Reports to the PlannedHost of this thread, if it has one, a kernel that reads and writes
/// `tensors`, some of which may be undefined.
void note_kernel(const char* name, at::TensorList tensors, double flops = 0);

}  // namespace lockstep
