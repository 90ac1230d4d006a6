#pragma once

// Internal: the state of the parameters of one buffer, and their update.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/param_and_grad_buffer.h"
#include "lockstep/kernels/step_control.h"
#include "lockstep/kernels/update_segment.h"
#include "lockstep/optimizer/optimizer.h"
#include "lockstep/optimizer/param_groups.h"
#include "lockstep/optimizer/update_rule.h"

namespace lockstep {

/// Whether the state is offloaded, and if so, whether the rule writes all elements of the
/// parameters in each step.
enum class Offload { none, writes_all, may_leave_some };

/// Flat tensors of buffer.owned_numel() elements, the ranges of buffer.owned() one after the other.
class OptimizerState {
 public:
  /// Allocates them, sets those of the rule to zero, and takes the master weights from the
  /// parameters. `group_of` has an index for each of buffer.params(). Offloaded: in the host's
  /// memory, while the parameters are on a device; not with a rule of matrices. On a planned rank
  /// see OnPlannedHost. ConfigError: parameters of a dtype other than fp32, fp64, bf16 and fp16;
  /// fp64 with a rule that keeps bf16.
  OptimizerState(const ParamAndGradBuffer& buffer, std::shared_ptr<const UpdateRule> rule,
                 std::vector<size_t> group_of, Offload offload = Offload::none);

  /// If offloaded: the current stream copies the gradients to the host, without a wait, and the
  /// parameters if they are needed there. step() works with these, so the host must have waited for
  /// the stream.
  void fetch();

  /// Updates buffer.owned()[range] of the parameters: step number `step`, from 1, one call of the
  /// rule for each of `groups`, or for each matrix. Collective if the rule is, as Muon is over
  /// tensor-parallel ranks.
  void step(size_t range, const std::vector<ParamGroup>& groups, double weight_decay, int64_t step,
            const kernels::StepControl& control);
  /// The number of the rule's step_numbers(). UsageError: it has none.
  int64_t count_numbers() const;
  /// For steps that are recorded and launched again: from now on the rule reads its step_numbers()
  /// from the device's memory. UsageError as count_numbers().
  void keep_numbers_on_device(size_t groups);
  /// Writes the numbers of step number `step` to that memory, without a wait.
  void upload_numbers(const std::vector<ParamGroup>& groups, double weight_decay, int64_t step);

  /// Notes a change of all parameters of the buffer: autograd refuses to use what it saved of them
  /// before.
  void note_change();

  /// Adds what it holds to `slices`.
  void list(std::vector<StateSlice>& slices) const;

  /// Sets the parameters from the master weights, and the other way round.
  void write_params();
  void read_params();

  int64_t bytes() const;

 private:
  struct Named {
    std::string name;
    at::Tensor tensor;
  };
  /// The segments of each group that has parameters there.
  using Segments = std::map<size_t, kernels::UpdateSegments>;
  /// One of the ranges that buffer.owned() lists. Segments count from its start.
  struct Piece {
    ElementRange in_buffer;
    ElementRange in_state;
    Segments segments;
  };

  /// The tensors that exist.
  std::vector<Named> tensors() const;
  /// Views of a range of the buffer and of the state, without segments and numbers.
  UpdateRange views_of(const ElementRange& in_buffer, int64_t start_in_state) const;
  Segments segments_of(const ElementRange& owned) const;
  void allocate(at::ScalarType dtype);
  template <class Call>
  void for_matrices(const Piece& piece, Call call) const;

  const ParamAndGradBuffer* buffer_;
  std::shared_ptr<const UpdateRule> rule_;
  std::vector<size_t> group_of_;  ///< of each parameter
  std::vector<Piece> pieces_;
  bool offloaded_;
  bool fetches_params_;
  /// If offloaded: the gradients of a step and its parameters, page-locked on the host.
  at::Tensor host_grads_, host_params_;
  at::Tensor master_;  ///< fp32 originals of bf16 and fp16 parameters; undefined for the others
  std::vector<at::Tensor> of_rule_;  ///< as the rule's statement lists them
  at::Tensor numbers_;  ///< fp64 [groups, numbers] of the rule; undefined: it passes them itself
};

}  // namespace lockstep
