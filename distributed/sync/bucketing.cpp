#include "lockstep/distributed/bucketing.h"

#include <algorithm>
#include <limits>
#include <map>

#include "lockstep/core/check.h"
#include "lockstep/distributed/buffer_kind.h"
#include "lockstep/distributed/description_check.h"
#include "lockstep/distributed/model_check.h"
#include "lockstep/distributed/model_units.h"
#include "lockstep/parallel_state/axis_groups.h"

namespace lockstep {
namespace {

struct BufferKey {
  at::ScalarType param_dtype;
  at::ScalarType grad_dtype;
  BufferKind kind;
  bool operator==(const BufferKey&) const = default;
};

/// The parameters of one buffer, with their positions among all parameters.
struct KeyedParams {
  BufferKey key;
  std::vector<NamedParameter> params;
  std::vector<int64_t> positions;
};

at::ScalarType grad_dtype(at::ScalarType param_dtype, bool reduce_in_fp32) {
  const auto bytes = static_cast<int64_t>(at::elementSize(param_dtype));
  return grad_element_bytes(bytes, reduce_in_fp32) == bytes ? param_dtype : at::kFloat;
}

std::vector<KeyedParams> group_by_key(const std::vector<NamedParameter>& parameters,
                                      bool reduce_in_fp32, MatrixLayout matrices,
                                      const RankGrids& grids,
                                      const std::vector<GroupKind>& unlike) {
  std::vector<KeyedParams> lists;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const NamedParameter& param = parameters[i];
    if (!param.tensor.requires_grad()) continue;
    const at::ScalarType dtype = param.tensor.scalar_type();
    require<UsageError>(at::isFloatingType(dtype), "parameter '{}': {} cannot be trained",
                        param.name, at::toString(dtype));
    const BufferKey key{dtype, grad_dtype(dtype, reduce_in_fp32),
                        buffer_kind(param.description, grids, matrices, unlike)};
    auto list = std::find_if(lists.begin(), lists.end(), [&](auto& l) { return l.key == key; });
    if (list == lists.end()) list = lists.insert(lists.end(), {key, {}, {}});
    list->params.push_back(param);
    list->positions.push_back(static_cast<int64_t>(i));
  }
  return lists;
}

/// The units of the parameters at `positions`, if there are units.
std::vector<int64_t> units_at(const std::vector<int64_t>& positions,
                              const std::vector<int64_t>& units) {
  std::vector<int64_t> result;
  if (units.empty()) return result;
  for (const int64_t position : positions) result.push_back(units[static_cast<size_t>(position)]);
  return result;
}

/// Whether the ranks over which gradients are reduced later lay out the buffers of `lists` over
/// `replicas` differently. Does not communicate with ranks that have no such gradients.
bool are_unlike(const std::vector<KeyedParams>& lists, GroupKind replicas,
                const std::vector<int64_t>& units, const ParallelState& state) {
  std::vector<MeshAxis> axes;
  std::string text;
  for (const KeyedParams& list : lists) {
    if (list.key.kind.replicas != replicas || !list.key.kind.apart.empty()) continue;
    text += fmt::format("buffer {}\n", fmt::join(renumbered(units_at(list.positions, units)), " "));
    for (const NamedParameter& param : list.params) {
      const std::vector<MeshAxis> over = partial_axes(param.description, state.grids());
      axes.insert(axes.end(), over.begin(), over.end());
      text += fmt::format("{} {}\n", fmt::join(param.tensor.sizes(), ","),
                          over.empty() ? "" : param.name);
    }
  }
  std::sort(axes.begin(), axes.end());
  axes.erase(std::unique(axes.begin(), axes.end()), axes.end());
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

Bucket make_bucket(ParamAndGradBuffer& buffer, size_t index) {
  const auto& range = buffer.layout().buckets[index];
  Bucket bucket;
  bucket.lender = buffer.lends_grads() ? &buffer : nullptr;
  bucket.grads =
      bucket.lender ? buffer.grad_data() : buffer.grad_data().slice(0, range.start, range.end);
  if (buffer.is_sharded()) bucket.grad_shard = buffer.held_grads(buffer.owned()[index]);
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

/// How the gradients of the buffers of `lists` are reduced, by BufferKind::replicas.
std::map<GroupKind, GradReduction> make_reductions(const std::vector<KeyedParams>& lists,
                                                   const ParallelState& state,
                                                   GradientScalingMode mode,
                                                   const DistributedDataParallelConfig& config) {
  const RankGrids& grids = state.grids();
  const bool accumulate_in_fp32 = config.reduce_scatter_with_fp32_accumulation;
  require<ConfigError>(!accumulate_in_fp32 || grids.sizes().optimizer_instances == 1,
                       "ddp.reduce_scatter_with_fp32_accumulation: found true, which needs "
                       "parallel.num_distributed_optimizer_instances = 1 (found {})",
                       grids.sizes().optimizer_instances);
  if (config.use_distributed_optimizer) check_optimizer_instances(grids);
  std::map<GroupKind, GradReduction> reductions;
  for (const GroupKind replicas : kReplicaKinds) {
    const auto list = std::find_if(lists.begin(), lists.end(), [&](const KeyedParams& l) {
      return l.key.kind.replicas == replicas;
    });
    if (list == lists.end()) continue;
    const ReductionKinds kinds =
        reduction_group(list->params.front().description, grids, config.use_distributed_optimizer);
    GradReduction reduction{.group = state.group(kinds.group)};
    if (kinds.instances) reduction.instances = state.group(*kinds.instances);
    reduction.factor = scaling_factor(mode, grids.size(GroupKind::dp_cp), grids.size(replicas));
    if (mode == GradientScalingMode::average_in_collective) reduction.op = ReduceOp::average;
    reduction.accumulate_in_fp32 = accumulate_in_fp32;
    reductions.emplace(replicas, std::move(reduction));
  }
  return reductions;
}

GradChecks checks_of(const DistributedDataParallelConfig& config) {
  std::optional<double> large;
  if (config.check_for_large_grads) large = config.large_grad_threshold;
  return {config.check_for_nan_in_grad, large};
}

LentMemory lent_memory(const DistributedDataParallelConfig& config) {
  switch (config.data_parallel_sharding_strategy) {
    case ShardingStrategy::optim_grads:
      return LentMemory::grads;
    case ShardingStrategy::optim_grads_params:
      return LentMemory::params_and_grads;
    default:
      return LentMemory::none;
  }
}

/// Adds a plan for each piece of `plan` that has memory of its own at its own times.
void cut_plan(const BufferPlan& plan, const std::vector<int64_t>& units,
              std::vector<BufferPlan>& plans) {
  std::vector<LayoutParam> sizes;
  for (const NamedParameter& param : plan.params)
    sizes.push_back(
        layout_param(param.description, param.tensor.sizes().vec(), param.tensor.numel()));
  std::vector<int64_t> own_units;
  if (plan.lent == LentMemory::params_and_grads) own_units = units_at(plan.positions, units);
  for (const UnitPiece& piece : unit_pieces(sizes, own_units, plan.layout)) {
    BufferPlan& part = plans.emplace_back(plan);
    part.params.clear();
    part.positions.clear();
    part.layout.bucket_size.reset();
    part.unit = piece.unit;
    for (const int64_t index : piece.params) {
      part.params.push_back(plan.params[static_cast<size_t>(index)]);
      part.positions.push_back(plan.positions[static_cast<size_t>(index)]);
    }
  }
}

GroupKind replicas_of(const BufferPlan& plan) { return replicas(plan.params.front().description); }

/// Fills result.groups, result.params and result.places from result.buffers. Without overlap all
/// buckets of a process group become ready at once, so they form one group.
void group_buckets(Bucketing& result, const std::vector<BufferPlan>& plans, bool overlap,
                   const GradChecks& checks) {
  std::vector<std::vector<Bucket>> groups;
  std::vector<size_t> plan_of;      // by group: that of its first bucket
  std::vector<size_t> first_place;  // by buffer
  for (const auto& buffer : result.buffers) {
    first_place.push_back(result.places.size());
    for (size_t i = 0; i < buffer->params().size(); ++i)
      result.places.push_back({.buffer = buffer.get(), .index = i});
  }
  result.pieces = pieces_in_launch_order(result.buffers, plans);
  for (const Bucketing::Piece& piece : result.pieces) {
    const GroupKind kind = replicas_of(plans[piece.buffer]);
    auto same = std::find_if(plan_of.begin(), plan_of.end(),
                             [&](size_t plan) { return replicas_of(plans[plan]) == kind; });
    if (overlap || same == plan_of.end()) {
      same = plan_of.insert(plan_of.end(), piece.buffer);
      groups.emplace_back();
    }
    const auto group = static_cast<size_t>(same - plan_of.begin());
    ParamAndGradBuffer& buffer = *result.buffers[piece.buffer];
    Bucketing::Place* const places = &result.places[first_place[piece.buffer]];
    for (const int64_t param : buffer.layout().buckets[piece.bucket].params)
      places[param].group = group;
    groups[group].push_back(make_bucket(buffer, piece.bucket));
  }
  std::map<RankList, size_t> numbers;  // counted among groups of the same ranks
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
  for (const BufferPlan& plan : plans) {
    if (plan.lent != LentMemory::none && !result.pool)
      result.pool = std::make_shared<BlockPool>(plan.params.front().tensor.device());
    result.buffers.push_back(std::make_unique<ParamAndGradBuffer>(
        plan.params, plan.grad_dtype, plan.layout, plan.reduction.group.rank(), plan.contents,
        Lending{plan.lent, result.pool}));
    result.units.push_back(plan.unit);
  }
  group_buckets(result, plans, overlap, checks);
  return result;
}

Bucketing make_bucketing(const std::vector<NamedParameter>& parameters,
                         const ParallelState& parallel_state,
                         const DistributedDataParallelConfig& config, GradientScalingMode mode,
                         bool disable_bucketing, MatrixLayout matrices,
                         const std::vector<int64_t>& units) {
  const RankGrids& grids = parallel_state.grids();
  const auto lists_with = [&](const std::vector<GroupKind>& unlike) {
    return group_by_key(parameters, config.grad_reduce_in_fp32, matrices, grids, unlike);
  };
  std::vector<KeyedParams> lists = lists_with({});
  require<UsageError>(!lists.empty() || grids.size(GroupKind::pp) > 1,
                      "DistributedDataParallel: none of the {} parameters requires a gradient",
                      parameters.size());
  std::vector<GroupKind> unlike;
  for (const GroupKind replicas : kReplicaKinds)
    if (are_unlike(lists, replicas, units, parallel_state)) unlike.push_back(replicas);
  if (!unlike.empty()) lists = lists_with(unlike);
  const auto reductions = make_reductions(lists, parallel_state, mode, config);
  std::vector<BufferPlan> plans;
  for (KeyedParams& list : lists) {
    const BufferKind& kind = list.key.kind;
    int64_t numel = 0;
    for (const NamedParameter& param : list.params) {
      require_partial_sums(param, grids);
      numel += param.tensor.numel();
    }
    LayoutOptions layout = layout_options(config, grids, kind, list.params.front().description,
                                          numel, !disable_bucketing);
    if (lent_memory(config) == LentMemory::params_and_grads && units.empty())
      layout.bucket_size = effective_bucket_size(config, numel, grids.size(GroupKind::dp_cp));
    BufferPlan plan{std::move(list.params),
                    std::move(list.positions),
                    list.key.grad_dtype,
                    reductions.at(kind.replicas),
                    layout,
                    BufferContents::params_and_grads,
                    lent_memory(config)};
    if (plan.lent == LentMemory::none)
      plans.push_back(std::move(plan));
    else
      cut_plan(plan, units, plans);
  }
  return make_bucketing(plans, config.overlap_grad_reduce, checks_of(config));
}

}  // namespace lockstep
