#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// Backward of one autograd graph in two parts: first the gradient of the input, which another
/// pipeline stage waits for, later those of the parameters. Together the parts run every operation
/// of an ordinary backward once and accumulate the same gradients.
///
/// Between the parts the graph and the gradients that reached its operations are kept. Operations
/// must compute, and add to gradients in place, only what autograd asks them for
/// (AutogradContext::needs_input_grad); recompute() is not such a one. A parameter that enters the
/// graph directly in several operations on the way to the input makes the first part do all.
class SplitBackward {
 public:
  /// `output` requires a gradient. `input` is a leaf that does, or undefined: then the first part
  /// goes as far as the parameter that lies deepest in the graph. Neither tensor is kept.
  SplitBackward(const at::Tensor& output, const at::Tensor& input);
  ~SplitBackward();
  SplitBackward(const SplitBackward&) = delete;
  SplitBackward& operator=(const SplitBackward&) = delete;

  /// `grad` is that of the output. Returns the gradient of the input; undefined where there is no
  /// input, or where the output does not depend on it.
  at::Tensor input_part(const at::Tensor& grad);

  /// Accumulates the gradients of the parameters and frees the graph.
  void weight_part();

 private:
  struct Graph;
  std::unique_ptr<Graph> graph_;
};

}  // namespace lockstep
