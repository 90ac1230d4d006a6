#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/core/check.h"
#include "lockstep/optimizer/audit.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/parallel_state/pipeline_position.h"
#include "lockstep/tests/distributed/random_cases.h"
#include "lockstep/tests/support/described_params.h"

/// Models and settings for the audit, drawn from a seed.
namespace lockstep::testing {

inline std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += "\n" + line;
  return text;
}

/// A layer norm whose gradients are partial over tp.
inline ParamDescription partial_over_tp() {
  return {.gradient_states = {{MeshAxis::tp, GradientState::partial_sum}}};
}

/// Parameters in numbered modules, which are the units of sharded parameters.
class AuditNet : public DescribedModule {
 public:
  void add(int64_t number, const std::string& name, std::vector<int64_t> shape,
           ParamDescription description = {}, at::ScalarType dtype = at::kDouble,
           bool trained = true) {
    std::shared_ptr<DescribedParams>& part = parts_[number];
    if (!part) part = register_module(std::to_string(number), std::make_shared<DescribedParams>());
    part->add(name, std::move(shape), std::move(description), dtype);
    if (!trained) at::Tensor((*part)[name]).set_requires_grad(false);
  }

 private:
  std::map<int64_t, std::shared_ptr<DescribedParams>> parts_;
};

/// All ranks draw the same model. Each rank's part depends on its position.
class DrawnAudit {
 public:
  DrawnAudit(uint32_t seed, const ParallelState& state) : draw_(seed), state_(state) {
    draw_settings();
    microbatches_ = draw_.below(5);
    const int64_t chunks = draw_.one_in(4) ? 2 : 1;
    for (int64_t c = 0; c < chunks; ++c) nets_.push_back(std::make_unique<AuditNet>());
    const int64_t count = draw_.between(2, 7);
    for (int64_t i = 0; i < count; ++i) add_parameter(i);
    const PipelinePosition place(state.grids(), state.rank());
    for (int64_t c = 0; c < chunks; ++c)
      wrappers_.push_back(std::make_unique<DistributedDataParallel>(
          *nets_[static_cast<size_t>(c)], state, ddp_,
          /*disable_bucketing=*/place.stage() > 0 || c > 0, matrix_layout(config_)));
    optimizer_ = std::make_unique<Optimizer>(models(), config_);
  }

  AuditedModel model() {
    AuditedModel model = {
        .models = models(), .ddp = ddp_, .optimizer = optimizer_.get(), .config = config_};
    for (const auto& net : nets_) model.modules.push_back(net.get());
    model.num_microbatches = microbatches_;
    if (microbatches_ > 2 && !wrappers_.front()->buffers().empty())
      model.loss = [mean = wrappers_.front()->scaling_mode() != GradientScalingMode::per_token,
                    count = microbatches_](const at::Tensor& losses) {
        return mean ? losses.mean() / static_cast<double>(count) : losses.sum();
      };
    return model;
  }

  std::string text() const {
    return fmt::format("{}, {}, bucket size {}{}{}{}", to_string(config_.optimizer),
                       to_string(ddp_.data_parallel_sharding_strategy),
                       ddp_.bucket_size.value_or(0),
                       ddp_.use_distributed_optimizer ? ", sharded" : "",
                       ddp_.overlap_grad_reduce ? ", overlap" : "",
                       nets_.size() > 1 ? ", two chunks" : "") +
           fmt::format(", {} micro-batches", microbatches_);
  }

 private:
  std::vector<DistributedDataParallel*> models() const {
    std::vector<DistributedDataParallel*> models;
    for (const auto& wrapper : wrappers_) models.push_back(wrapper.get());
    return models;
  }

  void draw_settings() {
    ddp_.use_distributed_optimizer =
        state_.grids().sizes().optimizer_instances > 1 || draw_.one_in(2);
    ddp_.overlap_grad_reduce = draw_.one_in(2);
    if (draw_.one_in(3)) {
      ddp_.calculate_per_token_loss = false;
      ddp_.average_in_collective = draw_.one_in(2);
    }
    if (draw_.one_in(2)) ddp_.bucket_size = draw_.between(1, 200);
    dtype_ = draw_.of<at::ScalarType>({at::kFloat, at::kDouble, at::kDouble, at::kBFloat16});
    ddp_.grad_reduce_in_fp32 = draw_.one_in(2);
    config_.optimizer =
        draw_.of<OptimizerKind>({OptimizerKind::adam, OptimizerKind::sgd, OptimizerKind::muon});
    if (draw_.one_in(3)) config_.decoupled_lr = 0.5;
    if (config_.optimizer == OptimizerKind::muon || !ddp_.use_distributed_optimizer) return;
    ddp_.data_parallel_sharding_strategy =
        draw_.of<ShardingStrategy>({ShardingStrategy::optim, ShardingStrategy::optim_grads,
                                    ShardingStrategy::optim_grads_params});
    if (ddp_.data_parallel_sharding_strategy != ShardingStrategy::optim)
      ddp_.overlap_grad_reduce = true;
  }

  ParamDescription draw_description(int64_t index) {
    ParamDescription description;
    description.is_expert = index > 1 && draw_.one_in(3);
    description.apply_weight_decay = draw_.one_in(2);
    description.is_embedding_or_output = draw_.one_in(4);
    for (const MeshAxis axis : description.is_expert ? std::vector{MeshAxis::etp, MeshAxis::ep}
                                                     : std::vector{MeshAxis::tp}) {
      const int64_t what = draw_.below(4), dim = draw_.below(2);
      if (what == 0) description.placements[axis] = Shard{dim};
      if (what == 1) description.gradient_states[axis] = GradientState::partial_sum;
      if (what == 2) description.gradient_states[axis] = GradientState::partial_mean;
    }
    const int64_t stages = draw_.below(7);
    const std::string name = "tie" + std::to_string(index);
    if (stages == 0) description.tie = Tie{name, TiedStages::first_and_last};
    if (stages == 1) description.tie = Tie{name, TiedStages::all};
    if (stages == 2) description.tie = Tie{name, TiedStages::first};
    if (stages == 3) description.gradient_states[MeshAxis::pp] = GradientState::partial_sum;
    if (stages == 4) description.stages = StageCopies::all;
    return description;
  }

  bool is_here(const ParamDescription& description, int64_t index) const {
    const PipelinePosition place(state_.grids(), state_.rank());
    if (!description.tie)
      return description.is_on_all_stages() || index % place.stages() == place.stage();
    const TiedStages stages = description.tie->stages;
    return stages == TiedStages::all || place.is_first_stage() ||
           (stages == TiedStages::first_and_last && place.is_last_stage());
  }

  /// Cut as torch.chunk does, so the last ranks may hold shorter pieces.
  std::vector<int64_t> local_shape(std::vector<int64_t> shape,
                                   const ParamDescription& description) const {
    for (const MeshAxis axis : kCuttingAxes) {
      const Placement placement = description.placement(axis);
      const auto* const shard = std::get_if<Shard>(&placement);
      if (!shard) continue;
      const RankGroups groups = state_.grids().groups(group_kind_of(axis));
      int64_t& length = shape[static_cast<size_t>(shard->dim)];
      const int64_t most = (length + groups.size() - 1) / groups.size();
      const int64_t start = std::min(groups.position_of(state_.rank()).value() * most, length);
      length = std::min(most, length - start);
    }
    return shape;
  }

  void add_parameter(int64_t index) {
    ParamDescription description = draw_description(index);
    const bool is_plain = index < 2;  // one in each chunk of each stage
    if (is_plain) description = {};
    if (index == 0) description.update = ParamUpdate::matrix;
    const std::vector<int64_t> shape = {draw_.between(8, 12), draw_.between(8, 12)};
    const bool trained = is_plain || description.tie || !draw_.one_in(6);
    const bool copied = description.tie && draw_.one_in(2);  // a copy in every chunk
    const auto own = static_cast<size_t>(draw_.below(static_cast<int64_t>(nets_.size())));
    for (size_t c = 0; c < nets_.size(); ++c)
      if ((is_plain || copied || c == own) && (is_plain || is_here(description, index)))
        nets_[c]->add(index / 2, "c" + std::to_string(c) + "p" + std::to_string(index),
                      local_shape(shape, description), description, dtype_, trained);
  }

  Draw draw_;
  const ParallelState& state_;
  at::ScalarType dtype_ = at::kDouble;
  int64_t microbatches_ = 0;  ///< number that is counted; 0: no_sync()
  DistributedDataParallelConfig ddp_;
  OptimizerConfig config_;
  std::vector<std::unique_ptr<AuditNet>> nets_;
  std::vector<std::unique_ptr<DistributedDataParallel>> wrappers_;
  std::unique_ptr<Optimizer> optimizer_;
};

}  // namespace lockstep::testing
