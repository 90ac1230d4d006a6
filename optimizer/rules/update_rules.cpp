#include "lockstep/optimizer/update_rules.h"

#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/kernels/adamw.h"
#include "lockstep/kernels/sgd.h"
#include "lockstep/optimizer/orthogonalize.h"
#include "lockstep/optimizer/whole_matrices.h"

namespace lockstep {
namespace {

class ConfiguredRule : public UpdateRule {
 public:
  ConfiguredRule(const OptimizerConfig& config, bool whole_matrices)
      : UpdateRule(update_statement(config, whole_matrices)), config_(config) {}

 protected:
  const OptimizerConfig config_;
};

class AdamRule final : public ConfiguredRule {
 public:
  using ConfiguredRule::ConfiguredRule;

  std::vector<double> step_numbers(double learning_rate, double weight_decay,
                                   int64_t step) const override {
    return {learning_rate, weight_decay, bias_correction(config_.adam_beta1, step),
            bias_correction(config_.adam_beta2, step)};
  }

  void update(const UpdateRange& range) const override {
    kernels::adamw(range.weights, range.grad, range.state[0], range.state[1], range.copy,
                   range.segments,
                   {.learning_rate = range.learning_rate,
                    .beta1 = config_.adam_beta1,
                    .beta2 = config_.adam_beta2,
                    .eps = config_.adam_eps,
                    .weight_decay = range.weight_decay,
                    .bias_correction1 = bias_correction(config_.adam_beta1, range.step),
                    .bias_correction2 = bias_correction(config_.adam_beta2, range.step)},
                   range.control);
  }

 private:
  static double bias_correction(double beta, int64_t step) {
    return 1 - std::pow(beta, static_cast<double>(step));
  }
};

class SgdRule final : public ConfiguredRule {
 public:
  using ConfiguredRule::ConfiguredRule;

  std::vector<double> step_numbers(double learning_rate, double weight_decay,
                                   int64_t /*step*/) const override {
    return {learning_rate, weight_decay};
  }

  void update(const UpdateRange& range) const override {
    const at::Tensor momentum = range.state.empty() ? at::Tensor() : range.state[0];
    kernels::sgd(range.weights, range.grad, momentum, range.copy, range.segments,
                 {.learning_rate = range.learning_rate,
                  .momentum = config_.sgd_momentum,
                  .weight_decay = range.weight_decay},
                 range.control);
  }
};

class MuonRule final : public ConfiguredRule {
 public:
  MuonRule(const OptimizerConfig& config, bool whole_matrices, const ParallelState& parallel_state)
      : ConfiguredRule(config, whole_matrices), parallel_state_(parallel_state) {}

  void update(const UpdateRange& range) const override {
    const NamedParameter& param = *range.parameter;
    const auto matrix = [&](const at::Tensor& flat) {
      return flat.view({-1, param.tensor.size(-1)});
    };
    const at::Tensor weights = matrix(range.weights), momentum = matrix(range.state[0]);
    const at::Tensor grad = matrix(range.gradient());
    const at::Tensor mean = momentum.lerp(grad, 1 - config_.muon_momentum);
    const at::Tensor update =
        config_.muon_use_nesterov ? grad.lerp(mean, config_.muon_momentum) : mean;
    const double decay = range.learning_rate * range.weight_decay;
    const at::Tensor stepped =
        at::add(weights * (1 - decay), direction(param, update), -range.learning_rate);
    range.write(momentum, mean);
    range.write_weights(stepped.reshape(-1));
  }

 private:
  /// The direction for the part of the matrix that this tensor-parallel rank holds.
  at::Tensor direction(const NamedParameter& param, const at::Tensor& update) const {
    const auto direction_of = [&](const at::Tensor& whole) {
      try {
        return muon_direction(whole, config_, param.description.rows_of_matrices);
      } catch (const UsageError& error) {
        fail<UsageError>("parameter '{}': {}", param.name, error.what());
      }
    };
    const MatrixCut cut(param, parallel_state_);
    if (!cut.is_cut()) return direction_of(update);
    const int64_t dim = cut.dim() == param.tensor.dim() - 1 ? 1 : 0;  // dimension of `update`
    return cut.own(direction_of(cut.joined(update, dim)), dim);
  }

  ParallelState parallel_state_;
};

}  // namespace

std::shared_ptr<const UpdateRule> update_rule(const OptimizerConfig& config, bool whole_matrices,
                                              const ParallelState& parallel_state,
                                              const std::shared_ptr<const UpdateRule>& own) {
  if (own && own->statement().unit == UpdateUnit::range) return own;
  if (own && whole_matrices) return with_whole_matrices(own, parallel_state);
  OptimizerConfig used = config;
  if (own) used.optimizer = OptimizerKind::adam;
  switch (update_kind(used, whole_matrices)) {
    case OptimizerKind::adam:
      return std::make_shared<AdamRule>(used, whole_matrices);
    case OptimizerKind::sgd:
      return std::make_shared<SgdRule>(used, whole_matrices);
    case OptimizerKind::muon:
      return std::make_shared<MuonRule>(used, whole_matrices, parallel_state);
  }
  fail<UsageError>("unknown kind of optimizer {}", static_cast<int>(used.optimizer));
}

}  // namespace lockstep
