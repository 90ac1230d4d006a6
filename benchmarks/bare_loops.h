#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/benchmarks/fused_rivals.h"

namespace lockstep::benchmarks {

/// Loops that read and write the memory of `passes`, fp32, and hardly compute: what the machine
/// allows an operation that must make these passes.
class BareLoops {
 public:
  explicit BareLoops(const std::vector<MemoryPass>& passes);
  void run() const;

 private:
  std::vector<MemoryPass> passes_;
  std::vector<at::Tensor> memory_;  // of the reads of all passes, and of their writes
};

/// An autograd function with the inputs of `rival` and results of the same shapes that computes
/// nothing: what libtorch takes for any such function.
Rival nothing_like(const Rival& rival);

}  // namespace lockstep::benchmarks
