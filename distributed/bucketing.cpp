#include "lockstep/distributed/bucketing.h"

#include <algorithm>
#include <limits>
#include <map>

#include "lockstep/core/check.h"
#include "lockstep/distributed/model_check.h"
#include "lockstep/distributed/partial_axes.h"

namespace lockstep {
namespace {

struct BufferKey {
  at::ScalarType param_dtype;
  at::ScalarType grad_dtype;
  bool is_expert;
  bool whole_matrices;
  std::vector<MeshAxis> apart;  ///< see axes_apart()
  bool operator==(const BufferKey&) const = default;
};

/// Of which parameters the buffers are laid out differently along an axis that is reduced later.
struct UnlikeLayouts {
  bool dense = false;
  bool experts = false;
};

/// The axes over which the gradient is still to be reduced and whose ranks hold other parameters
/// beside this one: always the stages of a pipeline, others where they have `unlike` layouts. Those
/// that have the same share buffers, so that these look the same to all ranks of the axes.
std::vector<MeshAxis> axes_apart(const ParamDescription& description, const RankGrids& grids,
                                 const UnlikeLayouts& unlike) {
  const std::vector<MeshAxis> axes = partial_axes(description, grids);
  const bool over_stages = !axes.empty() && axes.back() == MeshAxis::pp;
  if (over_stages || (description.is_expert ? unlike.experts : unlike.dense)) return axes;
  return {};
}

/// The parameters of one buffer, with their positions among all parameters.
struct KeyedParams {
  BufferKey key;
  std::vector<NamedParameter> params;
  std::vector<int64_t> positions;
};

at::ScalarType grad_dtype(at::ScalarType param_dtype, bool reduce_in_fp32) {
  const bool half = param_dtype == at::kBFloat16 || param_dtype == at::kHalf;
  return half && reduce_in_fp32 ? at::kFloat : param_dtype;
}

/// The reduction adds the terms of all ranks; a gradient that is declared otherwise, or is of
/// another piece on each rank, would come out wrong.
void require_partial_sums(const NamedParameter& param, const RankGrids& grids) {
  using enum MeshAxis;
  const auto check = [&](MeshAxis axis, int64_t ranks) {
    const Placement placement = param.description.placement(axis);
    require<UsageError>(ranks == 1 || !std::holds_alternative<Shard>(placement),
                        "parameter '{}': found {} over {}, which has {} ranks, allowed: Replicate, "
                        "because the gradients of all of them are added",
                        param.name, to_string(placement), to_string(axis), ranks);
    const GradientState state = param.description.gradient_state(axis);
    require<UsageError>(ranks == 1 || state == GradientState::partial_sum,
                        "parameter '{}': its gradient is declared {} over {}, which has {} ranks; "
                        "allowed: partial-sum, because the gradients of all of them are added",
                        param.name, to_string(state), to_string(axis), ranks);
  };
  if (param.description.is_expert) return check(edp, grids.size(GroupKind::expert_dp));
  check(dp, grids.size(GroupKind::dp));
  check(cp, grids.size(GroupKind::cp));
}

std::vector<KeyedParams> group_by_key(const std::vector<NamedParameter>& parameters,
                                      bool reduce_in_fp32, const ParameterPredicate& whole_matrices,
                                      const RankGrids& grids, const UnlikeLayouts& unlike) {
  std::vector<KeyedParams> lists;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const NamedParameter& param = parameters[i];
    if (!param.tensor.requires_grad()) continue;
    const at::ScalarType dtype = param.tensor.scalar_type();
    require<UsageError>(at::isFloatingType(dtype), "parameter '{}': {} cannot be trained",
                        param.name, at::toString(dtype));
    const BufferKey key{dtype, grad_dtype(dtype, reduce_in_fp32), param.description.is_expert,
                        param.tensor.dim() >= 2 && whole_matrices && whole_matrices(param),
                        axes_apart(param.description, grids, unlike)};
    auto list = std::find_if(lists.begin(), lists.end(), [&](auto& l) { return l.key == key; });
    if (list == lists.end()) list = lists.insert(lists.end(), {key, {}, {}});
    list->params.push_back(param);
    list->positions.push_back(static_cast<int64_t>(i));
  }
  return lists;
}

/// Whether the ranks over which gradients are reduced later lay out the buffers of `lists`
/// differently. Says nothing to ranks that have no such gradients.
bool are_unlike(const std::vector<KeyedParams>& lists, bool experts, const ParallelState& state) {
  std::vector<MeshAxis> axes = remaining_axes(experts);
  axes.pop_back();  // pp, which lies apart in any case
  std::vector<bool> used(axes.size(), false);
  std::string text;
  for (const KeyedParams& list : lists) {
    if (list.key.is_expert != experts || !list.key.apart.empty()) continue;
    text += "buffer\n";
    for (const NamedParameter& param : list.params) {
      const std::vector<MeshAxis> over = partial_axes(param.description, state.grids());
      for (size_t i = 0; i < axes.size(); ++i)
        if (std::find(over.begin(), over.end(), axes[i]) != over.end()) used[i] = true;
      text += fmt::format("{} {}\n", fmt::join(param.tensor.sizes(), ","),
                          over.empty() ? "" : param.name);
    }
  }
  for (size_t i = axes.size(); i-- > 0;)
    if (!used[i]) axes.erase(axes.begin() + static_cast<std::ptrdiff_t>(i));
  return !same_over_axes(text, axes, state);
}

std::vector<Bucketing::Piece> pieces_in_launch_order(
    const std::vector<std::unique_ptr<ParamAndGradBuffer>>& buffers,
    const std::vector<BufferPlan>& plans) {
  std::vector<Bucketing::Piece> pieces;
  for (size_t b = 0; b < buffers.size(); ++b) {
    const auto& buckets = buffers[b]->layout().buckets;
    for (size_t k = 0; k < buckets.size(); ++k) {
      int64_t first = std::numeric_limits<int64_t>::max();
      for (const int64_t index : buckets[k].params)
        first = std::min(first, plans[b].positions[static_cast<size_t>(index)]);
      pieces.push_back({b, k, first});
    }
  }
  std::stable_sort(
      pieces.begin(), pieces.end(), [&](const Bucketing::Piece& x, const Bucketing::Piece& y) {
        if (x.last_expected != y.last_expected) return x.last_expected > y.last_expected;
        return plans[x.buffer].reduction.group.ranks() < plans[y.buffer].reduction.group.ranks();
      });
  return pieces;
}

Bucket make_bucket(const ParamAndGradBuffer& buffer, size_t index) {
  const auto& range = buffer.layout().buckets[index];
  Bucket bucket;
  bucket.grads = buffer.grad_data().slice(0, range.start, range.end);
  if (buffer.is_sharded())
    bucket.grad_shard =
        buffer.grad_data().slice(0, buffer.owned()[index].start, buffer.owned()[index].end);
  for (const int64_t param : range.params) {
    bucket.parameters.push_back(buffer.params()[static_cast<size_t>(param)].name);
    bucket.grad_views.push_back(buffer.grad_view(static_cast<size_t>(param)));
  }
  return bucket;
}

std::string label_of(size_t number, const std::vector<Bucket>& buckets) {
  return fmt::format("bucket {} ('{}' to '{}')", number, buckets.back().parameters.back(),
                     buckets.front().parameters.front());
}

/// How gradients are reduced, and over which ranks parameters are gathered.
struct Reductions {
  GradReduction dense;
  GradReduction expert;

  const GradReduction& of(bool is_expert) const { return is_expert ? expert : dense; }
};

GradReduction reduction_over(const ParallelState& state, bool is_expert, bool sharded) {
  const bool several = sharded && state.grids().sizes().optimizer_instances > 1;
  if (!several) return {.group = state.group(is_expert ? GroupKind::expert_dp : GroupKind::dp_cp)};
  return {.group = state.group(is_expert ? GroupKind::intra_expert_dp : GroupKind::intra_dp_cp),
          .instances = state.group(GroupKind::inter_optimizer)};
}

Reductions make_reductions(const std::vector<KeyedParams>& lists, const ParallelState& state,
                           GradientScalingMode mode, bool sharded, bool accumulate_in_fp32) {
  const bool any_expert =
      std::any_of(lists.begin(), lists.end(), [](auto& list) { return list.key.is_expert; });
  require<ConfigError>(!accumulate_in_fp32 || state.grids().sizes().optimizer_instances == 1,
                       "ddp.reduce_scatter_with_fp32_accumulation: found true, allowed with: "
                       "parallel.num_distributed_optimizer_instances = 1 (found {})",
                       state.grids().sizes().optimizer_instances);
  GradReduction dense = reduction_over(state, false, sharded);
  GradReduction expert = any_expert ? reduction_over(state, true, sharded) : dense;
  const GradientScaling scaling = gradient_scaling(mode, state.grids().size(GroupKind::dp_cp),
                                                   state.grids().expert_data_parallel_size());
  dense.factor = scaling.dense;
  expert.factor = scaling.expert;
  if (mode == GradientScalingMode::average_in_collective) dense.op = expert.op = ReduceOp::average;
  dense.accumulate_in_fp32 = expert.accumulate_in_fp32 = accumulate_in_fp32;
  return {std::move(dense), std::move(expert)};
}

GradChecks checks_of(const DistributedDataParallelConfig& config) {
  std::optional<double> large;
  if (config.check_for_large_grads) large = config.large_grad_threshold;
  return {config.check_for_nan_in_grad, large};
}

bool is_expert(const BufferPlan& plan) { return plan.params.front().description.is_expert; }

/// Fills result.groups, result.params and result.places from result.buffers. Without overlap all
/// buckets of a process group get ready at once, so they are one group.
void group_buckets(Bucketing& result, const std::vector<BufferPlan>& plans, bool overlap,
                   const GradChecks& checks) {
  std::vector<std::vector<Bucket>> groups;
  std::vector<size_t> plan_of;      // of each group: that of its first bucket
  std::vector<size_t> first_place;  // of each buffer
  for (const auto& buffer : result.buffers) {
    first_place.push_back(result.places.size());
    for (size_t i = 0; i < buffer->params().size(); ++i)
      result.places.push_back({.buffer = buffer.get(), .index = i});
  }
  result.pieces = pieces_in_launch_order(result.buffers, plans);
  for (const Bucketing::Piece& piece : result.pieces) {
    const bool expert = is_expert(plans[piece.buffer]);
    auto same = std::find_if(plan_of.begin(), plan_of.end(),
                             [&](size_t plan) { return is_expert(plans[plan]) == expert; });
    if (overlap || same == plan_of.end()) {
      same = plan_of.insert(plan_of.end(), piece.buffer);
      groups.emplace_back();
    }
    const auto group = static_cast<size_t>(same - plan_of.begin());
    const ParamAndGradBuffer& buffer = *result.buffers[piece.buffer];
    Bucketing::Place* const places = &result.places[first_place[piece.buffer]];
    for (const int64_t param : buffer.layout().buckets[piece.bucket].params)
      places[param].group = group;
    groups[group].push_back(make_bucket(buffer, piece.bucket));
  }
  std::map<RankList, size_t> numbers;  // among those of the same ranks
  for (size_t g = 0; g < groups.size(); ++g) {
    const GradReduction& reduction = plans[plan_of[g]].reduction;
    const std::string label = label_of(numbers[reduction.group.ranks()]++, groups[g]);
    result.groups.emplace_back(label, std::move(groups[g]), reduction, checks);
  }
  for (const Bucketing::Place& place : result.places)
    result.params.push_back(
        {place.buffer->params()[place.index].name, static_cast<int64_t>(place.group)});
}

}  // namespace

Bucketing make_bucketing(const std::vector<BufferPlan>& plans, bool overlap, GradChecks checks) {
  Bucketing result;
  for (const BufferPlan& plan : plans)
    result.buffers.push_back(std::make_unique<ParamAndGradBuffer>(
        plan.params, plan.grad_dtype, plan.layout, plan.reduction.group.rank(), plan.contents));
  group_buckets(result, plans, overlap, checks);
  return result;
}

Bucketing make_bucketing(const std::vector<NamedParameter>& parameters,
                         const ParallelState& parallel_state,
                         const DistributedDataParallelConfig& config, GradientScalingMode mode,
                         bool disable_bucketing, const ParameterPredicate& whole_matrices) {
  const auto lists_with = [&](const UnlikeLayouts& unlike) {
    return group_by_key(parameters, config.grad_reduce_in_fp32, whole_matrices,
                        parallel_state.grids(), unlike);
  };
  std::vector<KeyedParams> lists = lists_with({});
  require<UsageError>(!lists.empty(),
                      "DistributedDataParallel: none of the {} parameters requires a gradient",
                      parameters.size());
  const UnlikeLayouts unlike = {are_unlike(lists, /*experts=*/false, parallel_state),
                                are_unlike(lists, /*experts=*/true, parallel_state)};
  if (unlike.dense || unlike.experts) lists = lists_with(unlike);
  const Reductions reductions =
      make_reductions(lists, parallel_state, mode, config.use_distributed_optimizer,
                      config.reduce_scatter_with_fp32_accumulation);
  const int64_t dp_cp = parallel_state.grids().size(GroupKind::dp_cp);
  std::vector<BufferPlan> plans;
  for (KeyedParams& list : lists) {
    const GradReduction& reduction = reductions.of(list.key.is_expert);
    LayoutOptions layout = {.distributed_optimizer = config.use_distributed_optimizer,
                            .data_parallel_size = reduction.group.size(),
                            .pad_for_high_bus_bandwidth = config.pad_buckets_for_high_nccl_busbw,
                            .whole_parameters = list.key.whole_matrices};
    int64_t numel = 0;
    for (const NamedParameter& param : list.params) {
      require_partial_sums(param, parallel_state.grids());
      numel += param.tensor.numel();
    }
    if (!disable_bucketing) layout.bucket_size = effective_bucket_size(config, numel, dp_cp);
    plans.push_back({std::move(list.params), std::move(list.positions), list.key.grad_dtype,
                     reduction, layout});
  }
  return make_bucketing(plans, config.overlap_grad_reduce, checks_of(config));
}

}  // namespace lockstep
