#pragma once

// Internal: the state of the parameters of one buffer.

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/param_and_grad_buffer.h"
#include "lockstep/kernels/adamw.h"
#include "lockstep/optimizer/optimizer.h"

namespace lockstep {

/// Flat tensors of buffer.owned_numel() elements, the ranges of buffer.owned() one after the other.
class OptimizerState {
 public:
  /// Allocates them, moments zero, and takes the master weights from the parameters.
  explicit OptimizerState(const ParamAndGradBuffer& buffer);

  /// Updates the parameters that this rank owns.
  void step(const kernels::AdamWScalars& scalars);

  /// Adds what it holds to `slices`.
  void list(std::vector<StateSlice>& slices) const;

  /// The parameters from the master weights, and the other way round.
  void write_params();
  void read_params();

  int64_t bytes() const;

 private:
  struct Named {
    const char* name;
    at::Tensor tensor;
  };
  /// One of the ranges that buffer.owned() lists. Segments count from its start.
  struct Piece {
    ElementRange in_buffer;
    ElementRange in_state;
    std::vector<kernels::AdamWSegment> segments;
  };

  /// Those tensors that exist.
  std::vector<Named> tensors() const;
  void note_change();

  const ParamAndGradBuffer* buffer_;
  std::vector<Piece> pieces_;
  at::Tensor master_;  ///< fp32 originals of bf16 and fp16 parameters; undefined for the others
  at::Tensor exp_avg_, exp_avg_sq_;
};

}  // namespace lockstep
