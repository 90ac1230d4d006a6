#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/config.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/kernels/adamw.h"

namespace lockstep {

/// AdamW on the flat buffers of DistributedDataParallel: one pass over contiguous memory, clipping
/// included. Every rank holds the whole state and makes the same step; see DistributedOptimizer for
/// a state that is cut over the ranks.
///
/// fp32 and fp64 parameters are updated in place. bf16 parameters have fp32 master weights, from
/// which they are rounded. Weight decay applies where the parameter's description says so.
class AdamW {
 public:
  /// What step() did.
  struct StepResult {
    double grad_norm = 0;  ///< of the whole model, before clipping
    bool skipped = false;  ///< nothing was changed, because of the norm; see skips_step()
  };

  /// The state of one buffer: flat tensors of buffer.owned_numel() elements, the ranges of
  /// buffer.owned() one after the other.
  struct State {
    at::Tensor master;      ///< fp32 originals of bf16 parameters; undefined for the others
    at::Tensor exp_avg;     ///< mean of the gradients
    at::Tensor exp_avg_sq;  ///< mean of the squared gradients
  };

  /// Takes lr, weight_decay, adam_beta1, adam_beta2, adam_eps and clip_grad out of `config`. The
  /// models must outlive the optimizer. UsageError: no model, a model for the distributed
  /// optimizer. ConfigError: a number out of its bounds, parameters of a dtype other than fp32,
  /// fp64 and bf16.
  AdamW(std::vector<DistributedDataParallel*> models, const OptimizerConfig& config);

  virtual ~AdamW() = default;
  AdamW(const AdamW&) = delete;
  AdamW& operator=(const AdamW&) = delete;

  /// One step with the final gradients: norm, clipping, update. Gradients are not changed. Call it
  /// on all ranks. UsageError if finalize_model_grads is still to be called.
  virtual StepResult step();

  void set_learning_rate(double value) { config_.lr = value; }
  void set_weight_decay(double value) { config_.weight_decay = value; }
  double learning_rate() const { return config_.lr; }
  double weight_decay() const { return config_.weight_decay; }

  /// Steps made; skipped ones do not count.
  int64_t num_steps() const { return num_steps_; }

  /// In the order of the models and of their buffers.
  const std::vector<State>& states() const { return states_; }

  /// Bytes of states().
  int64_t state_bytes() const;

  /// Takes the master weights of bf16 parameters from the parameters again, after somebody changed
  /// those (loaded weights, an initialization).
  void reload_model_params();

 protected:
  AdamW(std::vector<DistributedDataParallel*> models, const OptimizerConfig& config, bool sharded);

  const std::vector<DistributedDataParallel*>& models() const { return models_; }

 private:
  /// One of the ranges that buffer.owned() lists. Segments count from its start.
  struct Piece {
    ElementRange in_buffer;
    ElementRange in_state;
    std::vector<kernels::AdamWSegment> segments;
  };

  /// Views of a piece.
  struct Views {
    at::Tensor param, grad, master, exp_avg, exp_avg_sq;
  };

  struct Target {
    const ParamAndGradBuffer* buffer;
    std::vector<Piece> pieces;
  };

  static std::vector<Piece> pieces_of(const ParamAndGradBuffer& buffer);
  static Views views_of(const Target& target, const State& state, const Piece& piece);

  std::vector<DistributedDataParallel*> models_;
  OptimizerConfig config_;
  std::vector<Target> targets_;  ///< as states_
  std::vector<State> states_;
  int64_t num_steps_ = 0;
};

}  // namespace lockstep
