#include "lockstep/tests/distributed/drawn_model.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <ATen/ATen.h>

namespace lockstep::testing {
namespace {

using enum MeshAxis;

const std::vector<MeshAxis> kDenseAxes = {tp, cp, dp}, kExpertAxes = {etp, ep, edp};

std::vector<int64_t> expert_sizes(const ParallelSizes& sizes) {
  const int64_t etp = sizes.expert_tensor.value_or(sizes.tensor);
  const int64_t edp = sizes.world_size / (etp * sizes.expert * sizes.pipeline);
  return {etp, sizes.expert, edp, sizes.pipeline};
}

}  // namespace

GridArithmetic::GridArithmetic(const ParallelSizes& sizes)
    : dense_{sizes.tensor, sizes.context,
             sizes.world_size / (sizes.tensor * sizes.context * sizes.pipeline), sizes.pipeline},
      expert_(expert_sizes(sizes)) {}

GridPlace GridArithmetic::place(int64_t rank, bool expert) const {
  GridPlace place;
  for (size_t axis = 0; axis < 3; ++axis) {
    place.sizes.push_back(sizes(expert)[axis]);
    place.coordinates.push_back(rank % sizes(expert)[axis]);
    rank /= sizes(expert)[axis];
  }
  return place;
}

int64_t GridArithmetic::stage(int64_t rank) const { return rank / (world() / stages()); }

RankList GridArithmetic::along(int64_t rank, size_t axis, bool expert) const {
  int64_t stride = 1;
  for (size_t i = 0; i < axis; ++i) stride *= sizes(expert)[i];
  const int64_t size = sizes(expert)[axis], own = rank / stride % size;
  RankList ranks;
  for (int64_t i = 0; i < size; ++i) ranks.push_back(rank + (i - own) * stride);
  return ranks;
}

ParamDescription ModelParam::description() const {
  ParamDescription result{.is_expert = expert, .tie = tie};
  for (size_t i = 0; i < drawn.axes.size(); ++i) {
    const MeshAxis axis = (expert ? kExpertAxes : kDenseAxes)[i];
    if (axis == cp || axis == dp || axis == edp) continue;  // they default to partial_sum
    const AxisShare& share = drawn.axes[i];
    if (share.role == AxisRole::cut) result.placements[axis] = Shard{share.dim};
    if (share.role == AxisRole::sum) result.gradient_states[axis] = GradientState::partial_sum;
    if (share.role == AxisRole::mean) result.gradient_states[axis] = GradientState::partial_mean;
  }
  if (over_stages) result.gradient_states[pp] = *over_stages;
  return result;
}

std::string ModelParam::text() const {
  std::string result = drawn.text() + (expert ? " expert" : "");
  if (tie) result += fmt::format(" tied on {}", to_string(tie->stages));
  if (over_stages) result += fmt::format(" {} over pp", to_string(*over_stages));
  for (const Copy& copy : copies) result += fmt::format(" ({}, {})", copy.stage, copy.chunk);
  return result;
}

DrawnModel::DrawnModel(uint32_t seed, const ParallelSizes& sizes) : grid(sizes), seed_(seed) {
  Draw draw(seed);
  draw_config(draw, sizes);
  for (int64_t stage = 0; stage < grid.stages(); ++stage)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) add_anchor(stage, chunk);
  const int64_t count = draw.between(1, 8);
  for (int64_t i = 0; i < count; ++i) add_param(draw);
  bool exact = true;
  for (const ModelParam& param : params) exact = exact && is_power_of_two(divisor(param));
  config.grad_reduce_in_fp32 = !exact || !draw.one_in(3);
}

void DrawnModel::draw_config(Draw& draw, const ParallelSizes& sizes) {
  microbatches = draw.between(1, 3);
  chunks = draw.one_in(3) ? 2 : 1;
  counted = draw.one_in(2);
  even_tokens = draw.one_in(2);
  config.use_distributed_optimizer = !draw.one_in(3);
  config.overlap_grad_reduce = draw.one_in(2);
  config.allow_unused_parameters = draw.one_in(2);
  per_token = draw.one_in(2);
  config.calculate_per_token_loss = per_token;
  config.average_in_collective = !per_token && draw.one_in(3);
  if (draw.one_in(3)) config.num_buckets = draw.between(1, 4);
  if (!config.num_buckets && !draw.one_in(3)) config.bucket_size = draw.between(1, 400);
  if (!config.use_distributed_optimizer) return;
  config.overlap_param_gather = draw.one_in(2);
  force_all_reduce = draw.one_in(6);
  config.reduce_scatter_with_fp32_accumulation =
      per_token && sizes.optimizer_instances == 1 && draw.one_in(4);
}

void DrawnModel::add_anchor(int64_t stage, int64_t chunk) {
  DrawnParam drawn{.number = static_cast<int64_t>(params.size()), .shape = {3 + stage}};
  drawn.axes = {{AxisRole::same}, {AxisRole::sum}, {AxisRole::sum}};
  params.push_back({.drawn = drawn, .copies = {{stage, chunk}}});
}

void DrawnModel::add_param(Draw& draw) {
  std::vector<Usage> usages = {Usage::always};
  if (microbatches > 1 && !counted) usages.push_back(Usage::in_the_last);
  if (config.allow_unused_parameters) usages.push_back(Usage::now_and_then);
  ModelParam param{.drawn = draw_param(draw, static_cast<int64_t>(params.size()), usages)};
  param.drawn.trained = !draw.one_in(10);
  param.expert = draw.one_in(3);
  draw_axes(draw, param);
  draw_stages(draw, param);
  params.push_back(std::move(param));
}

void DrawnModel::draw_axes(Draw& draw, ModelParam& param) {
  using enum AxisRole;
  param.drawn.axes.assign(3, {sum});
  const auto dims = static_cast<int64_t>(param.drawn.shape.size());
  for (size_t axis = 0; axis < (param.expert ? 2u : 1u); ++axis) {
    const AxisRole role = draw.of<AxisRole>({same, same, cut, cut, cut, cut, sum, sum, sum, mean});
    param.drawn.axes[axis] = {role == cut && dims == 0 ? same : role};
    if (role == cut && dims > 0) param.drawn.axes[axis].dim = draw.below(dims);
  }
}

void DrawnModel::draw_stages(Draw& draw, ModelParam& param) {
  const bool tied = param.drawn.trained && draw.one_in(4);
  if (tied) return draw_tie(draw, param);
  const bool partial = grid.stages() > 1 && draw.one_in(4);
  const int64_t stage = draw.below(grid.stages()), chunk = draw.below(chunks);
  if (!partial) {
    param.copies = {{stage, chunk}};
    return;
  }
  param.over_stages = draw.one_in(4) ? GradientState::partial_mean : GradientState::partial_sum;
  for (int64_t each = 0; each < grid.stages(); ++each) param.copies.push_back({each, chunk});
}

void DrawnModel::draw_tie(Draw& draw, ModelParam& param) {
  using enum TiedStages;
  param.tie = Tie{param.drawn.name(), draw.of<TiedStages>({all, first_and_last, first})};
  for (int64_t stage = 0; stage < grid.stages(); ++stage) {
    const bool first_one = stage == 0, last = stage + 1 == grid.stages();
    if (param.tie->stages == first && !first_one) continue;
    if (param.tie->stages == first_and_last && !first_one && !last) continue;
    const int64_t chunk = draw.below(chunks);
    param.copies.push_back({stage, chunk});
    if (chunks > 1 && draw.one_in(3)) param.copies.push_back({stage, 1 - chunk});
  }
}

int64_t DrawnModel::tokens(int64_t rank) const {
  const GridPlace place = grid.place(rank, false);
  const int64_t part = place.coordinates[1] + place.sizes[1] * place.coordinates[2];
  return even_tokens ? 4 : (part * 3 + seed_) % 5;
}

int64_t DrawnModel::loss_divisor() const {
  if (!per_token) return grid.dp_cp();
  int64_t sum = 0;
  const int64_t stride = grid.place(0, false).sizes[0];  // between ranks with different data
  for (int64_t i = 0; i < grid.dp_cp(); ++i) sum += tokens(i * stride);
  return std::max<int64_t>(sum, 1);
}

int64_t DrawnModel::divisor(const ModelParam& param) const {
  const int64_t stages = param.over_stages == GradientState::partial_mean ? grid.stages() : 1;
  return loss_divisor() * stages * mean_ranks(param.drawn, grid.place(0, param.expert));
}

at::Tensor DrawnModel::gradient(const ModelParam& param, int64_t rank, int64_t step) const {
  const GridPlace place = grid.place(rank, param.expert);
  at::Tensor sum = at::zeros(local_shape(param.drawn, place), at::kDouble);
  for (size_t copy = 0; copy < param.copies.size() && param.drawn.trained; ++copy)
    sum += reduced_gradient(param.drawn, place, static_cast<int64_t>(copy), step, microbatches);
  const bool mean = param.over_stages == GradientState::partial_mean;
  return sum / (loss_divisor() * (mean ? grid.stages() : 1));
}

double DrawnModel::gradient_norm(int64_t step) const {
  double squares = 0;
  for (const ModelParam& param : params)
    for (int64_t rank = 0; rank < grid.world() / grid.stages(); ++rank) {
      const GridPlace place = grid.place(rank, param.expert);
      bool counts = true;  // only the first rank with a part counts
      for (size_t axis = 0; axis < 3; ++axis)
        if (param.drawn.axes[axis].role != AxisRole::cut)
          counts = counts && place.coordinates[axis] == 0;
      if (counts) squares += gradient(param, rank, step).square().sum().item<double>();
    }
  return std::sqrt(squares);
}

std::string DrawnModel::text() const {
  std::string result = fmt::format(
      "  tp cp dp {}, etp ep edp {}, stages {}, chunks {}, micro-batches {}{}, divided by {}\n",
      grid.place(0, false).sizes, grid.place(0, true).sizes, grid.stages(), chunks, microbatches,
      counted ? " counted" : "", loss_divisor());
  result += fmt::format(
      "  distributed optimizer {}, overlap {} {}, buckets {} of {}, unused {}, per token {}, "
      "average in collective {}, fp32 {} {}, forced {}\n",
      config.use_distributed_optimizer, config.overlap_grad_reduce, config.overlap_param_gather,
      config.num_buckets.value_or(0), config.bucket_size.value_or(0),
      config.allow_unused_parameters, per_token, config.average_in_collective,
      config.grad_reduce_in_fp32, config.reduce_scatter_with_fp32_accumulation, force_all_reduce);
  for (const ModelParam& param : params) result += "  " + param.text() + "\n";
  return result;
}

}  // namespace lockstep::testing
