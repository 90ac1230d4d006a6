#pragma once

// Internal: the state of the parameters of one buffer, and their update.

#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/param_and_grad_buffer.h"
#include "lockstep/kernels/step_control.h"
#include "lockstep/kernels/update_segment.h"
#include "lockstep/optimizer/optimizer.h"
#include "lockstep/optimizer/param_groups.h"
#include "lockstep/optimizer/update_rule.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Flat tensors of buffer.owned_numel() elements, the ranges of buffer.owned() one after the other.
class OptimizerState {
 public:
  /// Allocates them, moments zero, and takes the master weights from the parameters. `group_of` has
  /// an index for each of buffer.params(). ConfigError: parameters of another dtype than fp32,
  /// fp64, bf16 and fp16.
  OptimizerState(const ParamAndGradBuffer& buffer, const OptimizerConfig& config,
                 const ParallelState& parallel_state, std::vector<size_t> group_of);

  /// Updates buffer.owned()[range] of the parameters: step number `step`, from 1, one kernel for
  /// each of `groups`. For matrices that Muon updates and that are cut over tensor-parallel ranks
  /// it is collective over those.
  void step(size_t range, const OptimizerConfig& config, const std::vector<ParamGroup>& groups,
            int64_t step, const kernels::StepControl& control);
  /// Of all parameters of the buffer: autograd refuses to use what it saved of them before.
  void note_change();

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
  /// Of each group that has parameters there.
  using Segments = std::map<size_t, std::vector<kernels::UpdateSegment>>;
  /// One of the ranges that buffer.owned() lists. Segments count from its start.
  struct Piece {
    ElementRange in_buffer;
    ElementRange in_state;
    Segments segments;
  };
  /// Views of a range of the buffer and of the state; what does not exist is undefined.
  struct Views {
    at::Tensor param, grad, master, exp_avg, exp_avg_sq, momentum;

    const at::Tensor& weights() const { return master.defined() ? master : param; }
    at::Tensor copy() const { return master.defined() ? param : at::Tensor(); }
  };

  /// Those tensors that exist.
  std::vector<Named> tensors() const;
  Views views_of(const ElementRange& in_buffer, int64_t start_in_state) const;
  Segments segments_of(const ElementRange& owned) const;
  void step_muon(const OptimizerConfig& config, const std::vector<ParamGroup>& groups,
                 const Piece& piece, const kernels::StepControl& control);
  at::Tensor orthogonal_update(const NamedParameter& param, const at::Tensor& update,
                               const OptimizerConfig& config) const;

  const ParamAndGradBuffer* buffer_;
  ParallelState parallel_state_;
  std::vector<size_t> group_of_;  ///< of each parameter
  UpdateRule rule_;
  std::vector<Piece> pieces_;
  at::Tensor master_;  ///< fp32 originals of bf16 and fp16 parameters; undefined for the others
  at::Tensor exp_avg_, exp_avg_sq_, momentum_;
};

}  // namespace lockstep
