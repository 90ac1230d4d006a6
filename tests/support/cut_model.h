#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include "lockstep/core/config.h"
#include "lockstep/core/parameters.h"
#include "lockstep/parallel_state/parallel_state.h"

/// Models whose ranks hold shards of different sizes, and the same models in one process.
namespace lockstep::testing {

/// The number of ranks and their layout; grids() fills in sizes.world_size.
struct WorldLayout {
  int64_t world;
  ParallelSizes sizes = {};

  RankGrids grids() const {
    ParallelSizes all = sizes;
    all.world_size = world;
    return RankGrids(all);
  }
};

/// One whole parameter. `stage`: the pipeline stage that holds it; unset: all of them.
struct WholeParam {
  std::string name;
  std::vector<int64_t> shape;
  ParamDescription description = {};
  std::optional<int64_t> stage = {};
  bool trained = true;
};

/// Position of a rank on an axis of the grid, and the number of ranks along it.
struct AxisPlace {
  int64_t index = 0;
  int64_t count = 1;
};

inline AxisPlace place_on(const RankGrids& grids, MeshAxis axis, int64_t rank) {
  const std::map<MeshAxis, GroupKind> kinds = {{MeshAxis::tp, GroupKind::tp},
                                               {MeshAxis::etp, GroupKind::expert_tp},
                                               {MeshAxis::ep, GroupKind::ep},
                                               {MeshAxis::pp, GroupKind::pp},
                                               {MeshAxis::edp, GroupKind::expert_dp}};
  const RankGroups groups = grids.groups(kinds.at(axis));
  return {groups.position_of(rank).value(), groups.size()};
}

/// Position of `rank` among the data-parallel ranks of `param`, and their number.
inline AxisPlace replica_of(const RankGrids& grids, const WholeParam& param, int64_t rank) {
  if (param.description.is_expert) return place_on(grids, MeshAxis::edp, rank);
  const RankGroups groups = grids.groups(GroupKind::dp_cp);
  return {groups.position_of(rank).value(), groups.size()};
}

inline std::vector<MeshAxis> model_axes(const WholeParam& param) {
  using enum MeshAxis;
  return param.description.is_expert ? std::vector{etp, ep, pp} : std::vector{tp, pp};
}

/// The chunk of `whole` that torch.chunk gives `rank`.
inline at::Tensor piece_of(const at::Tensor& whole, const WholeParam& param, const RankGrids& grids,
                           int64_t rank) {
  at::Tensor piece = whole;
  for (const auto& [axis, placement] : param.description.placements) {
    const auto* const shard = std::get_if<Shard>(&placement);
    if (!shard) continue;
    const AxisPlace place = place_on(grids, axis, rank);
    const std::vector<at::Tensor> chunks = piece.chunk(place.count, shard->dim);
    const auto index = static_cast<size_t>(place.index);
    piece =
        index < chunks.size() ? chunks[index] : piece.narrow(shard->dim, piece.size(shard->dim), 0);
  }
  return piece;
}

inline at::Tensor wave(const WholeParam& param, double phase) {
  int64_t numel = 1;
  for (const int64_t size : param.shape) numel *= size;
  for (const char c : param.name) phase += 0.13 * static_cast<double>(c);
  return at::sin(at::arange(numel, at::kDouble) * 0.37 + phase).view(param.shape);
}

/// One factor for each element of the term that a rank adds to the loss. Every seventh is zero.
inline at::Tensor term_factors(const WholeParam& param, const RankGrids& grids, int64_t rank,
                               int step) {
  double phase = step + 1.7 * static_cast<double>(replica_of(grids, param, rank).index);
  double weight = 5.1;
  for (const MeshAxis axis : model_axes(param)) {
    const bool partial = param.description.gradient_state(axis) != GradientState::complete;
    if (partial) phase += weight * static_cast<double>(place_on(grids, axis, rank).index);
    weight *= 2.3;
  }
  const at::Tensor factors = wave(param, phase);
  return factors * at::arange(factors.numel()).remainder(7).ne(0).view(param.shape);
}

inline at::Tensor loss_term(const at::Tensor& piece, const at::Tensor& factors) {
  return (at::sin(piece) * factors).sum();
}

inline bool on_stage_of(const WholeParam& param, const RankGrids& grids, int64_t rank) {
  return !param.stage || place_on(grids, MeshAxis::pp, rank).index == *param.stage;
}

/// The parameters of one rank, as leaves.
inline std::vector<NamedParameter> pieces_of_rank(const std::vector<WholeParam>& model,
                                                  const ParallelState& state) {
  std::vector<NamedParameter> pieces;
  for (const WholeParam& param : model) {
    if (!on_stage_of(param, state.grids(), state.rank())) continue;
    at::Tensor piece =
        piece_of(wave(param, 0), param, state.grids(), state.rank()).contiguous().clone();
    pieces.push_back({param.name, piece.requires_grad_(param.trained), param.description});
  }
  return pieces;
}

/// Runs the backward of one rank.
inline void backward_of_rank(const std::vector<WholeParam>& model,
                             const std::vector<NamedParameter>& pieces, const ParallelState& state,
                             int step) {
  at::Tensor loss = at::zeros({}, at::kDouble);
  auto piece = pieces.begin();
  for (const WholeParam& param : model) {
    if (!on_stage_of(param, state.grids(), state.rank())) continue;
    const at::Tensor factors = term_factors(param, state.grids(), state.rank(), step);
    loss = loss + loss_term(piece->tensor, piece_of(factors, param, state.grids(), state.rank()));
    ++piece;
  }
  loss.backward();
}

/// The result of training a model in one process with plain libtorch.
struct WholeTraining {
  std::map<std::string, at::Tensor> params;
  std::vector<double> norms;   ///< of each step, before clipping
  std::vector<int64_t> zeros;  ///< zero elements of the gradients in each step
};

/// The loss of all ranks, on whole parameters. Each term that the descriptions declare counts once.
inline at::Tensor whole_loss(const std::vector<WholeParam>& model,
                             const std::map<std::string, at::Tensor>& params,
                             const RankGrids& grids, int step) {
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (int64_t rank = 0; rank < grids.sizes().world_size; ++rank)
    for (const WholeParam& param : model) {
      bool counts = param.trained && on_stage_of(param, grids, rank);
      double share = 1.0 / static_cast<double>(grids.size(GroupKind::dp_cp));
      for (const MeshAxis axis : model_axes(param)) {
        const AxisPlace place = place_on(grids, axis, rank);
        const GradientState gradient = param.description.gradient_state(axis);
        const bool copy = gradient == GradientState::complete && axis != MeshAxis::pp &&
                          !std::holds_alternative<Shard>(param.description.placement(axis));
        counts = counts && (!copy || place.index == 0);
        if (gradient == GradientState::partial_mean) share /= static_cast<double>(place.count);
      }
      if (!counts) continue;
      const at::Tensor factors = term_factors(param, grids, rank, step);
      loss = loss + share * loss_term(piece_of(params.at(param.name), param, grids, rank),
                                      piece_of(factors, param, grids, rank));
    }
  return loss;
}

inline OptimizerConfig cut_model_optimizer() {
  OptimizerConfig config;
  config.lr = 0.01;
  config.adam_beta2 = 0.95;
  config.weight_decay = 0.1;
  config.clip_grad = 0.3;
  config.log_num_zeros_in_grad = true;
  return config;
}

/// Trains for grids.size() steps. Step i uses the terms of the ranks of grids[i].
inline WholeTraining train_whole(const std::vector<WholeParam>& model,
                                 const std::vector<RankGrids>& grids) {
  const OptimizerConfig config = cut_model_optimizer();
  WholeTraining result;
  std::vector<at::Tensor> trained;
  for (const WholeParam& param : model) {
    at::Tensor whole = wave(param, 0).requires_grad_(param.trained);
    result.params[param.name] = whole;
    if (param.trained) trained.push_back(whole);
  }
  torch::optim::AdamW adamw(trained, torch::optim::AdamWOptions(config.lr)
                                         .betas({config.adam_beta1, config.adam_beta2})
                                         .weight_decay(config.weight_decay));
  for (size_t step = 0; step < grids.size(); ++step) {
    adamw.zero_grad();
    whole_loss(model, result.params, grids[step], static_cast<int>(step)).backward();
    int64_t zeros = 0;
    for (const at::Tensor& param : trained) zeros += param.grad().eq(0).sum().item<int64_t>();
    result.zeros.push_back(zeros);
    result.norms.push_back(torch::nn::utils::clip_grad_norm_(trained, config.clip_grad));
    adamw.step();
  }
  return result;
}

}  // namespace lockstep::testing
