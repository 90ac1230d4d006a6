#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// Backward of one autograd graph in two parts: first the gradient of the input, for which another
/// pipeline stage waits, later those of the parameters. Together the parts run every operation of
/// an ordinary backward once and accumulate the same gradients.
///
/// Between the parts the graph and the gradients that reached its operations are kept. Operations
/// must compute, and add to gradients in place, only what autograd asks them for
/// (AutogradContext::needs_input_grad). recompute() does all its work in the first part: its linear
/// layers add to gradients in place there, and its other gradients of parameters are kept, too.
/// Layers with deferred weight gradients refuse such a backward (UsageError).
///
/// The first part does all the work if a parameter enters the graph directly in several operations
/// on the path to the input, or if a hook would be called in both parts: a hook of an operation on
/// that path that also leads to parameters elsewhere, of its result (Tensor::register_hook(),
/// retain_grad()), or of a tensor that enters such an operation from elsewhere, such as a
/// parameter. Such a hook counts even after it was removed. Hooks after the accumulation, such as
/// those of DistributedDataParallel, do not count.
class SplitBackward {
 public:
  /// `output` requires a gradient. `input` is a leaf that requires one, or undefined. If undefined,
  /// the first part goes as far as the deepest parameter in the graph. Neither tensor is kept.
  SplitBackward(const at::Tensor& output, const at::Tensor& input);
  ~SplitBackward();
  SplitBackward(const SplitBackward&) = delete;
  SplitBackward& operator=(const SplitBackward&) = delete;

  /// `grad` is the gradient of the output. Returns the gradient of the input; undefined if there is
  /// no input, or if the output does not depend on it. No hooks may be registered after this.
  at::Tensor input_part(const at::Tensor& grad);

  /// Accumulates the gradients of the parameters and frees the graph.
  void weight_part();

 private:
  struct Graph;
  std::unique_ptr<Graph> graph_;
};

}  // namespace lockstep
