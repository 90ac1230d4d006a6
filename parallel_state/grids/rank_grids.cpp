#include "lockstep/parallel_state/rank_grids.h"

#include <algorithm>

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

/// Divides step by step, because a product of sizes may not fit.
void check_levels(const std::vector<int64_t>& levels, int64_t context) {
  if (levels.empty()) return;
  int64_t rest = context;
  for (const int64_t level : levels) {
    check_size("hierarchical-context", level);
    rest = rest % level == 0 ? rest / level : 0;
  }
  require<ConfigError>(rest == 1,
                       "hierarchical-context: found {}, allowed: sizes whose product is context "
                       "({})",
                       fmt::join(levels, ","), context);
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
  check_size("virtual pipeline", sizes.virtual_pipeline.value_or(1));
  require<ConfigError>(!sizes.virtual_pipeline || sizes.pipeline > 1,
                       "virtual pipeline ({}): allowed with a pipeline of more than 1 stage, found "
                       "{}",
                       sizes.virtual_pipeline.value_or(0), sizes.pipeline);
  require<ConfigError>(dense_.groups("pp") == expert_.groups("pp"),
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
  check_levels(sizes.hierarchical_context, sizes.context);
}

RankGroups RankGrids::groups(GroupKind kind) const {
  const int64_t instances = sizes_.optimizer_instances, pp = dense_sizes_.pp;
  const auto sliced = [&](const GroupSet& set, bool inside) {
    return RankGroups(set, GroupSet({set.size() / instances, instances}, {inside, !inside}));
  };
  switch (kind) {
    case GroupKind::ep:
    case GroupKind::tp_ep:
    case GroupKind::tp_ep_pp:
      return RankGroups(expert_.groups(to_string(kind)));
    case GroupKind::expert_tp:
      return RankGroups(expert_.groups("tp"));
    case GroupKind::expert_dp:
      return RankGroups(expert_.groups("dp"));
    case GroupKind::embedding:
      return RankGroups(dense_.groups("pp"))
          .picked(std::min<int64_t>(pp, 2), std::max<int64_t>(pp - 1, 1));
    case GroupKind::position_embedding:
      return RankGroups(dense_.groups("pp")).picked(1, 1);
    case GroupKind::intra_dp_cp:
      return sliced(dense_.groups("dp-cp"), true);
    case GroupKind::intra_expert_dp:
      return sliced(expert_.groups("dp"), true);
    case GroupKind::inter_optimizer:
      return instances == 1 ? RankGroups() : sliced(expert_.groups("dp"), false);
    case GroupKind::intra_optimizer:
      return RankGroups(expert_.groups("tp-ep-pp")).merged(expert_sizes_.dp / instances);
    default:
      return RankGroups(dense_.groups(to_string(kind)));
  }
}

RankList RankGrids::group_of(GroupKind kind, int64_t rank) const {
  const RankGroups all = groups(kind);
  const auto index = all.index_of(rank);
  return index ? all.group(*index) : RankList{};
}

RankGroups RankGrids::context_level(size_t level) const {
  const std::vector<int64_t>& levels = sizes_.hierarchical_context;
  require<UsageError>(level < levels.size(), "context level {} of {}: no such level", level,
                      levels.size());
  std::vector<bool> mask(levels.size(), false);
  mask[level] = true;
  return {dense_.groups("cp"), GroupSet(levels, mask)};
}

}  // namespace lockstep
