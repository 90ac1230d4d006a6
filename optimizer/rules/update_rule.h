#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/parameters.h"
#include "lockstep/kernels/step_control.h"
#include "lockstep/kernels/update_segment.h"
#include "lockstep/optimizer/update_statement.h"

namespace lockstep {

/// Elements that one call of an UpdateRule updates, and with what. Flat contiguous tensors of one
/// length on one device; `segments` says which of their elements the call is for.
struct UpdateRange {
  at::Tensor weights;  ///< fp32 or fp64: master weights, else the parameters themselves
  at::Tensor grad;     ///< of the dtype of the gradients; still with the loss scale, not clipped
  at::Tensor copy;     ///< bf16 or fp16 parameters, which follow the weights; else undefined
  std::vector<at::Tensor> state;  ///< as the rule's statement lists them
  /// In order. Padding inside one has zeros in all tensors, and the rule must leave zeros there.
  kernels::UpdateSegments segments;
  double learning_rate = 0;
  double weight_decay = 0;  ///< the group's wd_mult included
  int64_t step = 1;         ///< number of this step, from 1
  /// Always defined: what multiplies the gradients, whether to step, and in a recorded step the
  /// rule's step_numbers().
  kernels::StepControl control;
  /// With UpdateUnit::matrix: name, shape and description of the matrix; the other tensors hold all
  /// its elements. The parameter's own tensor is not written to. Otherwise null.
  const NamedParameter* parameter = nullptr;

  /// A range with views of only the elements of `segment`, which is then its only segment.
  UpdateRange part(const kernels::UpdateSegment& segment) const;
  /// New memory: the gradient without the loss scale and clipped, in the dtype of the weights.
  at::Tensor gradient() const;
  /// Writes `value` to `target`, which is the weights or a state, rounded to the target's dtype,
  /// unless the step is to be skipped. The host does not wait for the device. UsageError, before
  /// anything is written: a `value` of another shape.
  void write(const at::Tensor& target, const at::Tensor& value) const;
  /// The same for the weights; also updates `copy`.
  void write_weights(const at::Tensor& value) const;
};

/// How parameters are updated from their gradients. To write your own rule, derive from this class
/// and pass the rule to Optimizer. The optimizer handles state, master weights, clipping, the loss
/// scale, groups, shards and checkpoints.
///
///     struct SignDescent : lockstep::UpdateRule {
///       SignDescent() : UpdateRule({.name = "sign_descent"}) {}
///       void update(const lockstep::UpdateRange& all) const override {
///         for (const auto& segment : all.segments) {
///           const lockstep::UpdateRange range = all.part(segment);
///           range.write_weights(range.weights - range.learning_rate * range.gradient().sign());
///         }
///       }
///     };
///
/// One rule may serve several optimizers. examples/update_rule has one with a state.
class UpdateRule {
 public:
  /// UsageError as UpdateStatement::validate().
  explicit UpdateRule(UpdateStatement statement);
  virtual ~UpdateRule() = default;
  UpdateRule(const UpdateRule&) = delete;
  UpdateRule& operator=(const UpdateRule&) = delete;

  const UpdateStatement& statement() const { return statement_; }

  /// Updates weights, copy and state of the segments. It is called without autograd, once per step
  /// for each range of memory and each parameter group in it, or with UpdateUnit::matrix once for
  /// each parameter. The ranges depend on ranks and buckets. On the CPU it is not called for a
  /// skipped step; on a device it must decide by control[1], as write() does. An exception on one
  /// rank ends the job's groups: the other ranks raise CommunicationError with its text, in this
  /// step if it still communicates (shards, matrices that are cut), otherwise in their next
  /// collective.
  virtual void update(const UpdateRange& range) const = 0;

  /// The numbers of update() that change from step to step, for a step that is recorded once and
  /// launched many times. `range.control` then contains them from element 2 on, while
  /// learning_rate, weight_decay and step keep the values of the recording. Empty: the rule cannot
  /// be recorded.
  virtual std::vector<double> step_numbers(double /*learning_rate*/, double /*weight_decay*/,
                                           int64_t /*step*/) const {
    return {};
  }

 private:
  UpdateStatement statement_;
};

}  // namespace lockstep
