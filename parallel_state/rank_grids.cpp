#include "lockstep/parallel_state/rank_grids.h"

#include <functional>
#include <numeric>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

/// The size of the data-parallel axis that `used` ranks per replica leave.
int64_t remaining(int64_t world, std::initializer_list<int64_t> used, const std::string& product) {
  require<ConfigError>(world >= 1, "world-size: found {}, allowed: >= 1", world);
  int64_t rest = world;
  for (const int64_t size : used) {
    require<ConfigError>(rest % size == 0, "world-size ({}) is not divisible by {}", world,
                         product);
    rest /= size;
  }
  return rest;
}

void check_size(const char* name, int64_t size) {
  require<ConfigError>(size >= 1, "{}: found {}, allowed: >= 1", name, size);
}

GridSizes dense_grid(const ParallelSizes& s) {
  check_size("tensor", s.tensor);
  check_size("pipeline", s.pipeline);
  check_size("context", s.context);
  const std::string product =
      fmt::format("tensor ({}) x pipeline ({}) x context ({})", s.tensor, s.pipeline, s.context);
  const int64_t dp = remaining(s.world_size, {s.tensor, s.pipeline, s.context}, product);
  return {.tp = s.tensor, .cp = s.context, .ep = 1, .dp = dp, .pp = s.pipeline};
}

GridSizes expert_grid(const ParallelSizes& s) {
  const int64_t etp = s.expert_tensor.value_or(s.tensor);
  check_size("expert", s.expert);
  check_size("expert-tensor", etp);
  const std::string product =
      fmt::format("expert-tensor ({}) x expert ({}) x pipeline ({})", etp, s.expert, s.pipeline);
  const int64_t edp = remaining(s.world_size, {etp, s.expert, s.pipeline}, product);
  return {.tp = etp, .cp = 1, .ep = s.expert, .dp = edp, .pp = s.pipeline};
}

}  // namespace

const std::vector<GroupKind>& all_group_kinds() {
  using enum GroupKind;
  static const std::vector<GroupKind> kinds = {tp,
                                               cp,
                                               dp,
                                               dp_cp,
                                               pp,
                                               tp_pp,
                                               tp_dp,
                                               tp_cp,
                                               tp_dp_cp,
                                               ep,
                                               expert_tp,
                                               expert_dp,
                                               tp_ep,
                                               tp_ep_pp,
                                               embedding,
                                               position_embedding,
                                               intra_dp_cp,
                                               intra_expert_dp,
                                               inter_optimizer,
                                               intra_optimizer};
  return kinds;
}

const char* to_string(GroupKind kind) {
  static constexpr const char* names[] = {"tp",
                                          "cp",
                                          "dp",
                                          "dp-cp",
                                          "pp",
                                          "tp-pp",
                                          "tp-dp",
                                          "tp-cp",
                                          "tp-dp-cp",
                                          "ep",
                                          "expert-tp",
                                          "expert-dp",
                                          "tp-ep",
                                          "tp-ep-pp",
                                          "embedding",
                                          "position-embedding",
                                          "intra-dp-cp",
                                          "intra-expert-dp",
                                          "inter-optimizer",
                                          "intra-optimizer"};
  return names[static_cast<size_t>(kind)];
}

RankGrids::RankGrids(const ParallelSizes& sizes)
    : sizes_(sizes),
      dense_sizes_(dense_grid(sizes)),
      expert_sizes_(expert_grid(sizes)),
      dense_(dense_sizes_, sizes.order),
      expert_(expert_sizes_, sizes.order) {
  require<ConfigError>(!sizes.virtual_pipeline || sizes.pipeline > 1,
                       "virtual pipeline ({}): allowed with a pipeline of more than 1 stage, found "
                       "{}",
                       sizes.virtual_pipeline.value_or(0), sizes.pipeline);
  require<ConfigError>(dense_.groups("pp").group(0) == expert_.groups("pp").group(0),
                       "order '{}': pp must come last, because the dense grid (dp {}) and the "
                       "expert grid (dp {}) would place the pipeline stages differently",
                       sizes.order, dense_sizes_.dp, expert_sizes_.dp);
  const int64_t instances = sizes.optimizer_instances;
  check_size("optimizer-instances", instances);
  const int64_t dp_cp = dense_sizes_.dp * dense_sizes_.cp;
  require<ConfigError>(dp_cp % instances == 0 && expert_sizes_.dp % instances == 0,
                       "optimizer-instances ({}) must divide the data-parallel ranks (dp x cp = "
                       "{}, expert dp = {})",
                       instances, dp_cp, expert_sizes_.dp);
  if (!sizes.hierarchical_context.empty()) {
    for (const int64_t level : sizes.hierarchical_context)
      check_size("hierarchical-context", level);
    const int64_t product =
        std::accumulate(sizes.hierarchical_context.begin(), sizes.hierarchical_context.end(),
                        int64_t{1}, std::multiplies<>());
    require<ConfigError>(product == sizes.context,
                         "hierarchical-context: the product of {} is {}, allowed: context ({})",
                         fmt::join(sizes.hierarchical_context, ","), product, sizes.context);
  }
}

RankList RankGrids::Nested::group(int64_t index) const {
  const RankList around = outer.group(index / inner.count());
  RankList ranks;
  for (const int64_t position : inner.group(index % inner.count()))
    ranks.push_back(around[static_cast<size_t>(position)]);
  return ranks;
}

RankList RankGrids::Nested::group_of(int64_t rank) const {
  return group(outer.index_of(rank) * inner.count() + inner.index_of(outer.position_of(rank)));
}

RankGrids::Nested RankGrids::nested(GroupKind kind) const {
  const int64_t instances = sizes_.optimizer_instances;
  const auto plain = [](const GroupSet& set) {
    return Nested{set, GroupSet({set.size()}, {true})};
  };
  const auto sliced = [&](const GroupSet& set, bool inside) {
    return Nested{set, GroupSet({set.size() / instances, instances}, {inside, !inside})};
  };
  switch (kind) {
    case GroupKind::dp_cp:
      return plain(dense_.groups("dp-cp"));
    case GroupKind::ep:
      return plain(expert_.groups("ep"));
    case GroupKind::expert_tp:
      return plain(expert_.groups("tp"));
    case GroupKind::expert_dp:
      return plain(expert_.groups("dp"));
    case GroupKind::tp_ep:
    case GroupKind::tp_ep_pp:
      return plain(expert_.groups(to_string(kind)));
    case GroupKind::intra_dp_cp:
      return sliced(dense_.groups("dp-cp"), true);
    case GroupKind::intra_expert_dp:
      return sliced(expert_.groups("dp"), true);
    case GroupKind::inter_optimizer:
      return sliced(expert_.groups("dp"), false);
    case GroupKind::embedding:
    case GroupKind::position_embedding:
      return plain(dense_.groups("pp"));  // group() and group_of() pick the end stages
    case GroupKind::intra_optimizer:
      return plain(expert_.groups("tp-ep-pp"));
    default:
      return plain(dense_.groups(to_string(kind)));
  }
}

RankList RankGrids::merged_group(int64_t index) const {
  const Nested parts = nested(GroupKind::intra_optimizer);
  RankList ranks;
  for (int64_t part = index * merged_groups(); part < (index + 1) * merged_groups(); ++part) {
    const RankList group = parts.group(part);
    ranks.insert(ranks.end(), group.begin(), group.end());
  }
  return ranks;
}

int64_t RankGrids::count(GroupKind kind) const {
  if (kind == GroupKind::inter_optimizer && sizes_.optimizer_instances == 1) return 0;
  if (kind == GroupKind::intra_optimizer) return nested(kind).count() / merged_groups();
  return nested(kind).count();
}

int64_t RankGrids::size(GroupKind kind) const {
  return count(kind) == 0 ? 0 : static_cast<int64_t>(group(kind, 0).size());
}

RankList RankGrids::group(GroupKind kind, int64_t index) const {
  if (kind == GroupKind::intra_optimizer) return merged_group(index);
  RankList ranks = nested(kind).group(index);
  if (kind == GroupKind::position_embedding) return {ranks.front()};
  if (kind == GroupKind::embedding && ranks.size() > 1) return {ranks.front(), ranks.back()};
  return ranks;
}

RankList RankGrids::group_of(GroupKind kind, int64_t rank) const {
  if (kind == GroupKind::inter_optimizer && sizes_.optimizer_instances == 1) return {};
  if (kind == GroupKind::intra_optimizer)
    return merged_group(nested(kind).outer.index_of(rank) / merged_groups());
  RankList ranks = nested(kind).group_of(rank);
  const bool first = rank == ranks.front(), last = rank == ranks.back();
  if (kind == GroupKind::position_embedding) return first ? RankList{rank} : RankList{};
  if (kind != GroupKind::embedding || ranks.size() == 1) return ranks;
  return first || last ? RankList{ranks.front(), ranks.back()} : RankList{};
}

std::vector<RankList> RankGrids::context_level(size_t level) const {
  require<UsageError>(level < sizes_.hierarchical_context.size(),
                      "context level {} of {}: no such level", level,
                      sizes_.hierarchical_context.size());
  const GroupSet cp = dense_.groups("cp");
  std::vector<RankList> result;
  for (int64_t i = 0; i < cp.count(); ++i) {
    const auto levels = hierarchical_groups(cp.group(i), sizes_.hierarchical_context);
    result.insert(result.end(), levels[level].begin(), levels[level].end());
  }
  return result;
}

std::vector<std::vector<RankList>> hierarchical_groups(const RankList& ranks,
                                                       const std::vector<int64_t>& sizes) {
  std::vector<std::vector<RankList>> levels;
  for (size_t level = 0; level < sizes.size(); ++level) {
    std::vector<bool> mask(sizes.size(), false);
    mask[level] = true;
    auto& groups = levels.emplace_back(masked_orthogonal_groups(sizes, mask));
    for (RankList& group : groups)
      for (int64_t& position : group) position = ranks.at(static_cast<size_t>(position));
  }
  return levels;
}

}  // namespace lockstep
