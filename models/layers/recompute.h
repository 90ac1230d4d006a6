#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

class ActivationOffload;

/// A differentiable function of tensors that gives one tensor, the same for the same inputs.
using RecomputedFunction = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

/// function(inputs), keeping only `inputs` for backward, which computes the function again. Gives
/// the same value and the same gradients, those of parameters that the function uses included, in
/// exchange for one more forward. A parameter may be used in several recomputed functions and
/// outside of them, as an argument of libtorch's operators: its gradient arrives once, as the sum,
/// and its hooks (Tensor::register_hook()) get that. While backward computes the function again, no
/// other backward() may reach a parameter with such hooks, on another thread or inside the
/// function.
/// Activations that the function uses must be among `inputs`: one that it captures and that others
/// also use leads to libtorch's error about a second backward. create_graph is a UsageError. A
/// SplitBackward computes the function again once, in its first part; gradients of parameters that
/// no layer adds in place there are kept for its second part. With `offload`, the inputs that are
/// on its device wait for backward in the host's memory. One that is changed in place while it may
/// still be copied, until the next call, is a UsageError; a later change does not matter.
at::Tensor recompute(const RecomputedFunction& function, const std::vector<at::Tensor>& inputs,
                     ActivationOffload* offload = nullptr);

/// The same for inputs that are equal on all ranks of `group`. Until backward a rank keeps only its
/// part of each: 1 / ranks of the elements, whose number must be divisible by the ranks
/// (UsageError). Backward gathers them: one all-gather per input, with the label "saved <label>".
/// The ranks call this function, and backward, in the same order.
at::Tensor recompute_from_parts(const RecomputedFunction& function,
                                const std::vector<at::Tensor>& inputs, const ProcessGroup& group,
                                const std::string& label, ActivationOffload* offload = nullptr);

/// For layers: while a recomputed function runs for the first time on this thread, states that the
/// gradient of `parameter` will not come from autograd, but be accumulated by the layer's own
/// backward, hook included.
void leave_out_of_recompute(const at::Tensor& parameter);

/// For layers: returns read(), numbers of the device or of other ranks that the host waits for.
/// When a recomputed function runs for the second time, returns what its first run read at this
/// place instead: nobody waits again, and what read() sends is not sent again.
std::vector<int64_t> read_once(const std::function<std::vector<int64_t>()>& read);

}  // namespace lockstep
