#pragma once

// Internal.

#include <memory>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// While it lives, operators that this thread runs on tensors of the planned device are told to the
/// PlannedHost of the thread as kernels.
///
/// Bytes are those of the operator's tensors on the device: inputs are read, results and what it
/// changes are written, each tensor once; of an expanded tensor its memory. A lookup reads as much
/// as it writes. Views and empty tensors cost nothing, and an operator that is made of others is
/// those. Flops are 2 m n k of each product of matrices of m x k and k x n elements; fused
/// attention of sequences of s and t tokens has 4 s t operations forward for each channel of each
/// head, and 10 s t backward, half of that where it is causal.
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

/// Tells the PlannedHost of this thread, if it has one, of a kernel that reads and writes
/// `tensors`, of which some may be undefined.
void note_kernel(const char* name, at::TensorList tensors, double flops = 0);

}  // namespace lockstep
