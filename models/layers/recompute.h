#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

/// A differentiable function of tensors that gives one tensor, the same for the same inputs.
using RecomputedFunction = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

/// function(inputs), keeping only `inputs` for backward, which computes the function again. Gives
/// the same value and the same gradients, those of parameters that the function uses included, in
/// exchange for one more forward. A parameter must be used in one recomputed function only, because
/// each use passes its gradient on by itself. Backward must be torch::autograd::backward, not
/// torch::autograd::grad, which would not reach the parameters; with create_graph it is a
/// UsageError.
at::Tensor recompute(const RecomputedFunction& function, const std::vector<at::Tensor>& inputs);

/// The same for inputs that are the same on all ranks of `group`, of each of which a rank keeps its
/// part (1 / ranks of the elements, which must divide; UsageError) until backward gathers them, one
/// all-gather an input with the label "saved <label>". The ranks call it, and backward, in the same
/// order.
at::Tensor recompute_from_parts(const RecomputedFunction& function,
                                const std::vector<at::Tensor>& inputs, const ProcessGroup& group,
                                const std::string& label);

}  // namespace lockstep
