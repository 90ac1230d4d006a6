#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/parallel_state/rank_generator.h"
#include "lockstep/parallel_state/rank_groups.h"

/// Every group of a job, from its sizes alone. Dense layers use the grid tp x cp x dp x pp, experts
/// the grid etp x ep x edp x pp; the two share pp and the world.
namespace lockstep {

/// How a world of ranks is divided. The names shorten those of Megatron Core's
/// initialize_model_parallel: `tensor` is its tensor_model_parallel_size.
struct ParallelSizes {
  int64_t world_size = 1;
  int64_t tensor = 1;
  int64_t pipeline = 1;
  std::optional<int64_t> virtual_pipeline = {};  ///< model chunks per pipeline rank
  int64_t context = 1;
  int64_t expert = 1;
  std::optional<int64_t> expert_tensor = {};  ///< unset: tensor
  std::string order = "tp-cp-ep-dp-pp";
  int64_t optimizer_instances = 1;                 ///< replicas of the distributed optimizer
  std::vector<int64_t> hierarchical_context = {};  ///< levels whose product is `context`, or none
};

/// The kinds of groups. The comment gives the name that `lockstep plan groups` uses, if it differs.
enum class GroupKind {
  tp,
  cp,
  dp,
  dp_cp,  // dp-cp
  pp,
  tp_pp,     // tp-pp: the ranks of one model replica
  tp_dp,     // tp-dp
  tp_cp,     // tp-cp
  tp_dp_cp,  // tp-dp-cp
  ep,
  expert_tp,           // expert-tp
  expert_dp,           // expert-dp
  tp_ep,               // tp-ep
  tp_ep_pp,            // tp-ep-pp
  embedding,           // first and last stage of a pipeline
  position_embedding,  // position-embedding: first stage of a pipeline
  intra_dp_cp,         // intra-dp-cp: the part of dp-cp inside one optimizer instance
  intra_expert_dp,     // intra-expert-dp
  inter_optimizer,     // inter-optimizer: the same shard in all optimizer instances
  intra_optimizer,     // intra-optimizer: all ranks that shard one optimizer instance
};

/// All kinds, in the order of the enumeration.
const std::vector<GroupKind>& all_group_kinds();

/// "dp-cp", ...
const char* to_string(GroupKind kind);

/// The groups of a job. Costs the same for any world size until groups are listed.
class RankGrids {
 public:
  /// ConfigError, naming the sizes: a size that is below 1 or does not divide the world, virtual
  /// stages without a pipeline, an order that lacks an axis or puts pp where the two grids would
  /// disagree on it, optimizer instances that do not divide their group, levels whose product is
  /// not `context`.
  explicit RankGrids(const ParallelSizes& sizes);

  const ParallelSizes& sizes() const { return sizes_; }
  int64_t data_parallel_size() const { return dense_sizes_.dp; }
  int64_t expert_tensor_size() const { return expert_sizes_.tp; }
  int64_t expert_data_parallel_size() const { return expert_sizes_.dp; }

  /// The groups of a kind; none for inter_optimizer with one instance.
  RankGroups groups(GroupKind kind) const;
  /// The groups of level `level` of hierarchical context parallelism. Level 0 varies fastest.
  /// UsageError: no such level.
  RankGroups context_level(size_t level) const;

  /// groups(kind).count(), .size(), .group(index).
  int64_t count(GroupKind kind) const { return groups(kind).count(); }
  int64_t size(GroupKind kind) const { return groups(kind).size(); }
  RankList group(GroupKind kind, int64_t index) const { return groups(kind).group(index); }
  /// The group that holds `rank`; empty if it is in none.
  RankList group_of(GroupKind kind, int64_t rank) const;

 private:
  ParallelSizes sizes_;
  GridSizes dense_sizes_;
  GridSizes expert_sizes_;
  RankGenerator dense_;
  RankGenerator expert_;
};

}  // namespace lockstep
