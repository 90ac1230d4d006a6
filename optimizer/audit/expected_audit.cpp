#include "lockstep/optimizer/expected_audit.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <set>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"
#include "lockstep/distributed/buffer_kind.h"
#include "lockstep/distributed/model_units.h"
#include "lockstep/distributed/shard_ranges.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/parallel_state/rank_program.h"

namespace lockstep {
namespace {

/// Factors by rank.
using Terms = std::map<int64_t, ScalingFactor>;

void add(Terms& sum, const Terms& more, int64_t divisor = 1) {
  for (const auto& [rank, own] : more) {
    const ScalingFactor term = lowest_terms(own.numerator, own.denominator * divisor);
    const auto [found, is_new] = sum.try_emplace(rank, term);
    if (is_new) continue;
    ScalingFactor& old = found->second;
    old = lowest_terms(old.numerator * term.denominator + term.numerator * old.denominator,
                       old.denominator * term.denominator);
  }
}

int64_t numel_of(const DescribedParameter& param) {
  int64_t numel = 1;
  for (const int64_t size : param.shape) numel = checked_mul(numel, size, param.name);
  return numel;
}

/// Parameters that share a buffer.
struct WorkedBuffer {
  BufferKind kind = {};
  std::string dtype = {};
  std::vector<size_t> params = {};  ///< positions in the chunk
  LayoutOptions options = {};
  ParamLayout layout = {};
};

/// One bucket, in the order of launch.
struct WorkedBucket {
  const WorkedBuffer* buffer;
  size_t index;
  size_t last_expected;  ///< the position whose gradient backward yields last
};

/// Derives buffers and buckets from descriptions and settings.
class WorkedLayout {
 public:
  WorkedLayout(const RankGrids& grids, const AuditSettings& settings)
      : grids_(grids), settings_(settings) {}

  std::vector<WorkedBuffer> buffers_of(const DescribedChunk& chunk) const {
    const MatrixLayout matrices = settings_.with_update
                                      ? matrix_layout(settings_.optimizer, settings_.own_rule)
                                      : MatrixLayout::cut;
    std::vector<WorkedBuffer> lists;
    for (size_t i = 0; i < chunk.parameters.size(); ++i) {
      const DescribedParameter& param = chunk.parameters[i];
      if (!param.trained) continue;
      const BufferKind kind = buffer_kind(param.description, grids_, matrices, chunk.unlike);
      auto same = std::find_if(lists.begin(), lists.end(), [&](const WorkedBuffer& list) {
        return list.kind == kind && list.dtype == param.dtype;
      });
      if (same == lists.end())
        same = lists.insert(lists.end(), WorkedBuffer{.kind = kind, .dtype = param.dtype});
      same->params.push_back(i);
    }
    std::vector<WorkedBuffer> buffers;
    for (const WorkedBuffer& list : lists) cut(list, chunk, buffers);
    return buffers;
  }

  /// Buckets whose last gradients come first are launched first. Without overlap, those of the same
  /// kind of replicas follow each other.
  std::vector<WorkedBucket> launch_order(const std::vector<WorkedBuffer>& buffers) const {
    std::vector<WorkedBucket> buckets;
    for (const WorkedBuffer& buffer : buffers)
      for (size_t k = 0; k < buffer.layout.buckets.size(); ++k) {
        size_t last = std::numeric_limits<size_t>::max();
        for (const int64_t index : buffer.layout.buckets[k].params)
          last = std::min(last, buffer.params[static_cast<size_t>(index)]);
        buckets.push_back({&buffer, k, last});
      }
    std::stable_sort(buckets.begin(), buckets.end(),
                     [](const WorkedBucket& x, const WorkedBucket& y) {
                       return x.last_expected > y.last_expected;
                     });
    if (settings_.ddp.overlap_grad_reduce || buckets.empty()) return buckets;
    const GroupKind first = buckets.front().buffer->kind.replicas;
    std::stable_partition(buckets.begin(), buckets.end(), [&](const WorkedBucket& bucket) {
      return bucket.buffer->kind.replicas == first;
    });
    return buckets;
  }

 private:
  /// A list is one buffer or, if gradients are sharded, one for each piece of unit_pieces().
  void cut(const WorkedBuffer& list, const DescribedChunk& chunk,
           std::vector<WorkedBuffer>& buffers) const {
    int64_t numel = 0;
    std::vector<LayoutParam> sizes;
    std::vector<int64_t> units;
    for (const size_t i : list.params) {
      const DescribedParameter& param = chunk.parameters[i];
      sizes.push_back(layout_param(param.description, param.shape, numel_of(param)));
      units.push_back(param.unit);
      numel = checked_add(numel, numel_of(param), "parameters");
    }
    const ParamDescription& first = chunk.parameters[list.params.front()].description;
    WorkedBuffer whole = list;
    whole.options = layout_options(settings_.ddp, grids_, list.kind, first, numel, chunk.bucketed);
    const ShardingStrategy strategy = settings_.ddp.data_parallel_sharding_strategy;
    const bool shards_params = strategy == ShardingStrategy::optim_grads_params;
    if (!shards_params && strategy != ShardingStrategy::optim_grads) {
      whole.layout = compute_param_layout(sizes, whole.options);
      buffers.push_back(std::move(whole));
      return;
    }
    if (!shards_params) units.clear();
    for (const UnitPiece& piece : unit_pieces(sizes, units, whole.options)) {
      WorkedBuffer& part = buffers.emplace_back(whole);
      part.params.clear();
      part.options.bucket_size.reset();
      std::vector<LayoutParam> own;
      for (const int64_t index : piece.params) {
        own.push_back(sizes[static_cast<size_t>(index)]);
        part.params.push_back(list.params[static_cast<size_t>(index)]);
      }
      part.layout = compute_param_layout(own, part.options);
    }
  }

  const RankGrids& grids_;
  const AuditSettings& settings_;
};

/// The terms that follow from descriptions.
class WorkedTerms {
 public:
  WorkedTerms(const ChunksOfRank& chunks, const RankGrids& grids, GradientScalingMode mode)
      : chunks_(chunks), grids_(grids), mode_(mode) {}

  const std::vector<DescribedChunk>& chunks_of(int64_t rank) {
    const auto [found, is_new] = known_.try_emplace(rank);
    if (is_new) found->second = chunks_(rank);
    return found->second;
  }

  std::vector<AuditTerms> terms_of(int64_t rank, const DescribedParameter& param) {
    std::vector<AuditTerms> single;
    for (const auto& [from, factor] : final_terms(rank, param))
      single.push_back({factor.numerator, factor.denominator, {from}});
    return grouped_terms(single);
  }

  std::vector<int64_t> token_ranks(int64_t rank) const {
    std::vector<int64_t> ranks;
    if (mode_ != GradientScalingMode::per_token) return ranks;
    for (const int64_t member : grids_.group_of(GroupKind::dp_cp, rank))
      ranks.push_back(grids_.group_of(GroupKind::pp, member).back());
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  }

  /// Among ranks that hold the same elements, one counts them: the first along each axis that does
  /// not cut the parameter, on the first stage that has a copy.
  bool counts(int64_t rank, const ParamDescription& description) const {
    const auto is_first = [&](GroupKind kind) {
      const RankList ranks = grids_.group_of(kind, rank);
      return !ranks.empty() && ranks.front() == rank;
    };
    for (const MeshAxis axis : kCuttingAxes)
      if (description.lives_on(axis) && description.placement(axis) == Placement(Replicate{}) &&
          !is_first(group_kind_of(axis)))
        return false;
    if (description.tie) return is_first(tie_group_kind(description.tie->stages));
    return !description.is_on_all_stages() || is_first(GroupKind::pp);
  }

 private:
  /// The gradient of this copy before tied ones are added: after the reduction over the replicas
  /// and over the first `axes` of the model's axes.
  Terms terms_of_copy(int64_t rank, const ParamDescription& description, size_t axes) {
    Terms terms;
    if (axes == 0) {
      const int64_t divisor =
          mode_ == GradientScalingMode::per_token ? 1 : grids_.size(GroupKind::dp_cp);
      for (const int64_t member : grids_.group_of(replicas(description), rank))
        terms[member] = {1, divisor};
      return terms;
    }
    const MeshAxis axis = model_axes(description)[axes - 1];
    const GradientState state = description.gradient_state(axis);
    if (state == GradientState::complete) return terms_of_copy(rank, description, axes - 1);
    const RankList along = grids_.group_of(group_kind_of(axis), rank);
    const bool is_mean = state == GradientState::partial_mean;
    for (const int64_t member : along)
      add(terms, terms_of_copy(member, description, axes - 1),
          is_mean ? static_cast<int64_t>(along.size()) : 1);
    return terms;
  }

  Terms final_terms(int64_t rank, const DescribedParameter& param) {
    const size_t axes = model_axes(param.description).size();
    if (!param.description.tie) return terms_of_copy(rank, param.description, axes);
    const Tie& tie = *param.description.tie;
    const RankList holders = grids_.group_of(tie_group_kind(tie.stages), rank);
    require<UsageError>(!holders.empty(),
                        "audit: parameter '{}' on rank {} is tied on {}, and this rank holds "
                        "another stage",
                        param.name, rank, to_string(tie.stages));
    Terms terms;
    for (const int64_t holder : holders)
      for (const DescribedChunk& chunk : chunks_of(holder))
        for (const DescribedParameter& copy : chunk.parameters)
          if (copy.trained && copy.description.tie == param.description.tie)
            add(terms, terms_of_copy(holder, copy.description, axes));
    return terms;
  }

  const ChunksOfRank& chunks_;
  const RankGrids& grids_;
  GradientScalingMode mode_;
  std::map<int64_t, std::vector<DescribedChunk>> known_;
};

class WorkedAudit {
 public:
  WorkedAudit(const ChunksOfRank& chunks, const RankGrids& grids, const AuditSettings& settings)
      : grids_(grids),
        settings_(settings),
        mode_(scaling_mode(settings.ddp)),
        layout_(grids, settings),
        terms_(chunks, grids, mode_) {}

  GradientScalingMode mode() const { return mode_; }

  /// The number of trained elements of the model, which needs no rank to be asked twice.
  int64_t elements(const ChunksOfRank& chunks) const {
    std::map<int64_t, int64_t> held;  // by how often each element is held
    for (int64_t rank = 0; rank < grids_.sizes().world_size; ++rank) {
      std::set<std::string> ties;
      for (const DescribedChunk& chunk : chunks(rank))
        for (const DescribedParameter& param : chunk.parameters) {
          if (!param.trained) continue;
          const auto& tie = param.description.tie;
          if (tie && !ties.insert(tie->name).second) continue;
          AuditedParameter as_held;
          as_held.last = numel_of(param);
          set_effect(as_held, param.description, grids_, rank, {});
          held[as_held.copies * as_held.replicas] += as_held.last;
        }
    }
    int64_t elements = 0;
    for (const auto& [times, of_all] : held) elements += of_all / times;
    return elements;
  }

  AuditedRank of(int64_t rank) {
    AuditedRank result = {.rank = rank};
    std::set<std::pair<TiedStages, std::string>> seen;  // only one copy per rank counts
    const std::vector<DescribedChunk> chunks = terms_.chunks_of(rank);
    for (size_t c = 0; c < chunks.size(); ++c) {
      const std::vector<WorkedBuffer> buffers = layout_.buffers_of(chunks[c]);
      const std::vector<WorkedBucket> order = layout_.launch_order(buffers);
      for (size_t number = 0; number < order.size(); ++number) {
        const ParamLayout::Bucket& bucket =
            order[number].buffer->layout.buckets[order[number].index];
        for (const int64_t index : bucket.params) {
          AuditedParameter param = entry(rank, chunks[c], order[number], index);
          param.chunk = static_cast<int64_t>(c);
          if (settings_.with_buckets) param.reduction = bucket_text(rank, chunks[c], order, number);
          result.parameters.push_back(std::move(param));
        }
      }
      drop_later_copies(chunks[c], result, static_cast<int64_t>(c), seen);
    }
    sort_parameters(result);
    return result;
  }

 private:
  AuditedParameter entry(int64_t rank, const DescribedChunk& chunk, const WorkedBucket& at,
                         int64_t index) {
    const WorkedBuffer& buffer = *at.buffer;
    const DescribedParameter& param = chunk.parameters[buffer.params[static_cast<size_t>(index)]];
    AuditedParameter audited = {
        .name = param.name, .shape = param.shape, .description = param.description.to_string()};
    note_owned(rank, buffer, buffer.layout.buckets[at.index], index, param.description, audited);
    if (settings_.with_update)
      audited.update = update_text(
          update_statement(settings_.optimizer, buffer.kind.whole_matrices, settings_.own_rule),
          param.max_lr, param.min_lr, param.wd_mult, step_text(settings_.optimizer));
    if (audited.first != audited.last) {
      audited.terms = terms_.terms_of(rank, param);
      if (settings_.with_tokens) audited.token_ranks = terms_.token_ranks(rank);
      audited.counted = terms_.counts(rank, param.description);
    }
    set_effect(audited, param.description, grids_, rank, settings_.ddp);
    return audited;
  }

  void note_owned(int64_t rank, const WorkedBuffer& buffer, const ParamLayout::Bucket& bucket,
                  int64_t index, const ParamDescription& description,
                  AuditedParameter& audited) const {
    const ParamLayout::Slot& slot = buffer.layout.slots[static_cast<size_t>(index)];
    audited.last = slot.end - slot.start;
    if (!buffer.options.distributed_optimizer) return;
    const ReductionKinds kinds = reduction_group(description, grids_, /*sharded=*/true);
    const int64_t position = grids_.groups(kinds.group).position_of(rank).value();
    const ElementRange own = shard_of_bucket(bucket, buffer.options.data_parallel_size, position);
    audited.first = std::clamp(own.start, slot.start, slot.end) - slot.start;
    audited.last = std::clamp(own.end, slot.start, slot.end) - slot.start;
    if (audited.first >= audited.last) audited.first = audited.last = 0;
  }

  std::string bucket_text(int64_t rank, const DescribedChunk& chunk,
                          const std::vector<WorkedBucket>& order, size_t number) const {
    const WorkedBuffer& buffer = *order[number].buffer;
    const bool sharded = settings_.ddp.use_distributed_optimizer;
    const ReductionKinds kinds =
        reduction_group(chunk.parameters[buffer.params.front()].description, grids_, sharded);
    const auto text_of = [&](GroupKind kind) {
      return group_text(to_string(kind), grids_.group_of(kind, rank));
    };
    const char* const op = mode_ == GradientScalingMode::average_in_collective ? "average" : "sum";
    return reduction_text(number, order.size(),
                          buffer.layout.buckets[order[number].index].params.size(),
                          fmt::format("{} {}", sharded ? "reduce-scatter" : "all-reduce", op),
                          text_of(kinds.group), kinds.instances ? text_of(*kinds.instances) : "");
  }

  /// Only the first of several copies of a tied parameter on a rank counts.
  static void drop_later_copies(const DescribedChunk& chunk, AuditedRank& rank, int64_t number,
                                std::set<std::pair<TiedStages, std::string>>& seen) {
    for (const DescribedParameter& param : chunk.parameters) {
      const auto& tie = param.description.tie;
      if (!param.trained || !tie || seen.emplace(tie->stages, tie->name).second) continue;
      for (AuditedParameter& audited : rank.parameters)
        if (audited.chunk == number && audited.name == param.name) audited.counted = false;
    }
  }

  const RankGrids& grids_;
  const AuditSettings& settings_;
  GradientScalingMode mode_;
  WorkedLayout layout_;
  WorkedTerms terms_;
};

}  // namespace

AuditReport expected_audit(const ChunksOfRank& chunks, const RankGrids& grids,
                           const AuditSettings& settings, const std::vector<int64_t>& ranks) {
  WorkedAudit worked(chunks, grids, settings);
  AuditReport report = {.world_size = grids.sizes().world_size,
                        .layout = layout_text(grids),
                        .scaling = to_string(worked.mode())};
  std::vector<int64_t> listed = ranks;
  if (listed.empty()) {
    listed.resize(static_cast<size_t>(report.world_size));
    std::iota(listed.begin(), listed.end(), int64_t{0});
  }
  for (const int64_t rank : listed) report.ranks.push_back(worked.of(rank));
  if (!settings.knows_all_ranks) return report;
  const int64_t elements = worked.elements(chunks);
  for (AuditedRank& rank : report.ranks) rank.norm_elements = rank.zero_elements = elements;
  return report;
}

}  // namespace lockstep
