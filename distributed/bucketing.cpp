#include "lockstep/distributed/bucketing.h"

#include <algorithm>
#include <limits>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

struct BufferKey {
  at::ScalarType param_dtype;
  at::ScalarType grad_dtype;
  bool is_expert;
  bool operator==(const BufferKey&) const = default;
};

/// The parameters of one buffer, with their positions among all parameters.
struct BufferPlan {
  BufferKey key;
  std::vector<NamedParameter> params;
  std::vector<int64_t> positions;
};

at::ScalarType grad_dtype(at::ScalarType param_dtype, bool reduce_in_fp32) {
  const bool half = param_dtype == at::kBFloat16 || param_dtype == at::kHalf;
  return half && reduce_in_fp32 ? at::kFloat : param_dtype;
}

std::vector<BufferPlan> plan_buffers(const std::vector<NamedParameter>& parameters,
                                     bool reduce_in_fp32) {
  std::vector<BufferPlan> plans;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const NamedParameter& param = parameters[i];
    if (!param.tensor.requires_grad()) continue;
    const at::ScalarType dtype = param.tensor.scalar_type();
    require<UsageError>(at::isFloatingType(dtype), "parameter '{}': {} cannot be trained",
                        param.name, at::toString(dtype));
    const BufferKey key{dtype, grad_dtype(dtype, reduce_in_fp32), param.description.is_expert};
    auto plan = std::find_if(plans.begin(), plans.end(), [&](auto& p) { return p.key == key; });
    if (plan == plans.end()) plan = plans.insert(plans.end(), {key, {}, {}});
    plan->params.push_back(param);
    plan->positions.push_back(static_cast<int64_t>(i));
  }
  return plans;
}

/// One bucket of one buffer, before it is put into a group.
struct Piece {
  size_t buffer;
  size_t bucket;
  int64_t last_expected;  ///< position of the parameter whose gradient is expected last
};

std::vector<Piece> pieces_in_launch_order(
    const std::vector<std::unique_ptr<ParamAndGradBuffer>>& buffers,
    const std::vector<BufferPlan>& plans) {
  std::vector<Piece> pieces;
  for (size_t b = 0; b < buffers.size(); ++b) {
    const auto& buckets = buffers[b]->layout().buckets;
    for (size_t k = 0; k < buckets.size(); ++k) {
      int64_t first = std::numeric_limits<int64_t>::max();
      for (const int64_t index : buckets[k].params)
        first = std::min(first, plans[b].positions[static_cast<size_t>(index)]);
      pieces.push_back({b, k, first});
    }
  }
  std::stable_sort(pieces.begin(), pieces.end(), [](const Piece& x, const Piece& y) {
    return x.last_expected > y.last_expected;
  });
  return pieces;
}

Bucket make_bucket(const ParamAndGradBuffer& buffer, size_t index) {
  const auto& range = buffer.layout().buckets[index];
  Bucket bucket;
  bucket.grads = buffer.grad_data().narrow(0, range.start, range.end - range.start);
  for (const int64_t param : range.params)
    bucket.parameters.push_back(buffer.params()[static_cast<size_t>(param)].name);
  return bucket;
}

std::string label_of(size_t position, const std::vector<Bucket>& buckets) {
  return fmt::format("bucket {} ('{}' to '{}')", position, buckets.back().parameters.back(),
                     buckets.front().parameters.front());
}

/// What the buckets of dense parameters and of experts reduce over, and how.
struct Reduction {
  ProcessGroup group;
  ScalingFactor factor;
};

struct Reductions {
  Reduction dense;
  Reduction expert;
  ReduceOp op;

  const Reduction& of(bool is_expert) const { return is_expert ? expert : dense; }
};

Reductions make_reductions(const std::vector<BufferPlan>& plans, const ParallelState& state,
                           GradientScalingMode mode) {
  const ProcessGroup dense = state.group(GroupKind::dp_cp);
  const bool any_expert =
      std::any_of(plans.begin(), plans.end(), [](auto& plan) { return plan.key.is_expert; });
  const ProcessGroup expert = any_expert ? state.group(GroupKind::expert_dp) : dense;
  const GradientScaling scaling =
      gradient_scaling(mode, dense.size(), state.grids().expert_data_parallel_size());
  const bool average = mode == GradientScalingMode::average_in_collective;
  return {{dense, scaling.dense},
          {expert, scaling.expert},
          average ? ReduceOp::average : ReduceOp::sum};
}

std::unique_ptr<ParamAndGradBuffer> make_buffer(const BufferPlan& plan, const ProcessGroup& group,
                                                const DistributedDataParallelConfig& config,
                                                int64_t dp_cp) {
  int64_t numel = 0;
  for (const NamedParameter& param : plan.params) numel += param.tensor.numel();
  LayoutOptions options;
  options.bucket_size = effective_bucket_size(config, numel, dp_cp);
  options.data_parallel_size = group.size();
  return std::make_unique<ParamAndGradBuffer>(plan.params, plan.key.grad_dtype, options);
}

/// Fills result.groups, result.params and result.places from result.buffers. Without overlap all
/// buckets of a process group get ready at once, so they are one group.
void group_buckets(Bucketing& result, const std::vector<BufferPlan>& plans,
                   const Reductions& reductions, bool overlap) {
  std::vector<std::vector<Bucket>> groups;
  std::vector<bool> is_expert;      // of each group
  std::vector<size_t> first_place;  // of each buffer
  for (const auto& buffer : result.buffers) {
    first_place.push_back(result.places.size());
    for (size_t i = 0; i < buffer->params().size(); ++i)
      result.places.push_back({.buffer = buffer.get(), .index = i});
  }
  for (const Piece& piece : pieces_in_launch_order(result.buffers, plans)) {
    const bool expert = plans[piece.buffer].key.is_expert;
    auto same = std::find(is_expert.begin(), is_expert.end(), expert);
    if (overlap || same == is_expert.end()) {
      same = is_expert.insert(is_expert.end(), expert);
      groups.emplace_back();
    }
    const auto group = static_cast<size_t>(same - is_expert.begin());
    const ParamAndGradBuffer& buffer = *result.buffers[piece.buffer];
    Bucketing::Place* const places = &result.places[first_place[piece.buffer]];
    for (const int64_t param : buffer.layout().buckets[piece.bucket].params)
      places[param].group = group;
    groups[group].push_back(make_bucket(buffer, piece.bucket));
  }
  for (size_t g = 0; g < groups.size(); ++g) {
    const Reduction& reduction = reductions.of(is_expert[g]);
    const std::string label = label_of(g, groups[g]);
    result.groups.emplace_back(label, std::move(groups[g]), reduction.group, reduction.factor,
                               reductions.op);
  }
  for (const Bucketing::Place& place : result.places)
    result.params.push_back(
        {place.buffer->params()[place.index].name, static_cast<int64_t>(place.group)});
}

}  // namespace

std::optional<int64_t> effective_bucket_size(const DistributedDataParallelConfig& config,
                                             int64_t numel, int64_t dp_cp) {
  if (config.num_buckets) return std::max<int64_t>(numel / *config.num_buckets, 1);
  if (config.bucket_size) return config.bucket_size;
  if (!config.overlap_grad_reduce) return std::nullopt;
  return std::max<int64_t>(40'000'000, 1'000'000 * dp_cp);
}

Bucketing make_bucketing(const std::vector<NamedParameter>& parameters,
                         const ParallelState& parallel_state,
                         const DistributedDataParallelConfig& config, GradientScalingMode mode) {
  const std::vector<BufferPlan> plans = plan_buffers(parameters, config.grad_reduce_in_fp32);
  require<UsageError>(!plans.empty(),
                      "DistributedDataParallel: none of the {} parameters requires a gradient",
                      parameters.size());
  const Reductions reductions = make_reductions(plans, parallel_state, mode);
  const int64_t dp_cp = reductions.dense.group.size();
  Bucketing result;
  for (const BufferPlan& plan : plans)
    result.buffers.push_back(
        make_buffer(plan, reductions.of(plan.key.is_expert).group, config, dp_cp));
  group_buckets(result, plans, reductions, config.overlap_grad_reduce);
  return result;
}

}  // namespace lockstep
