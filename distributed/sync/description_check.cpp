#include "lockstep/distributed/description_check.h"

#include <map>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/axis_groups.h"

namespace lockstep {
namespace {

constexpr const char* kOtherFronts =
    "use DistributedDataParallel and finalize_model_grads(), or GradientSynchronizer(module, "
    "state, ...)";

void refuse_partial(const NamedParameter& param, MeshAxis axis, const char* front) {
  fail<UsageError>(
      "{}: the gradient of '{}' is declared {} over {}, allowed: complete, because this API "
      "reduces only over the data-parallel ranks; {}",
      front, param.name, to_string(param.description.gradient_state(axis)), to_string(axis),
      kOtherFronts);
}

}  // namespace

void refuse_other_cuts(const std::vector<NamedParameter>& parameters, const RankGrids& grids,
                       const char* front) {
  for (const NamedParameter& param : parameters) {
    if (!param.cut_by) continue;
    for (const auto& [axis, ranks] : *param.cut_by) {
      const int64_t allowed = grids.size(group_kind_of(axis));
      require<UsageError>(ranks == allowed,
                          "{}: parameter '{}': found a piece for {} ranks of {}, allowed: for {}, "
                          "as in the ParallelState; make the model with the same one, for instance "
                          "as ParallelContext::state",
                          front, param.name, ranks, to_string(axis), allowed);
    }
  }
}

void require_partial_sums(const NamedParameter& param, const RankGrids& grids) {
  for (const MeshAxis axis : batch_axes(param.description)) {
    const int64_t ranks = grids.size(group_kind_of(axis));
    const GradientState state = param.description.gradient_state(axis);
    require<UsageError>(ranks == 1 || state == GradientState::partial_sum,
                        "parameter '{}': its gradient is declared {} over {}, which has {} ranks; "
                        "allowed: partial-sum, because the gradients of all of them are added",
                        param.name, to_string(state), to_string(axis), ranks);
  }
}

void refuse_ties(const std::vector<NamedParameter>& parameters, const RankGrids& grids,
                 const char* front) {
  std::map<std::string, const std::string*> ties;
  for (const NamedParameter& param : parameters) {
    const std::optional<Tie>& tie = param.description.tie;
    if (!tie || !param.tensor.requires_grad()) continue;
    const auto [first, is_new] = ties.emplace(tie->name, &param.name);
    require<UsageError>(is_new,
                        "{}: parameters '{}' and '{}' are both tied as '{}', allowed: one tensor "
                        "for both; use DistributedDataParallel and finalize_model_grads(), which "
                        "adds the gradients of tied copies",
                        front, *first->second, param.name, tie->name);
    require<UsageError>(grids.size(GroupKind::pp) == 1,
                        "{}: parameter '{}' is tied '{}' on {}, and there are {} pipeline stages, "
                        "allowed: 1; use DistributedDataParallel and finalize_model_grads(), which "
                        "adds the gradients of tied copies",
                        front, param.name, tie->name, to_string(tie->stages),
                        grids.size(GroupKind::pp));
  }
}

void require_dp_cp_averages(const std::vector<NamedParameter>& parameters, const RankGrids& grids,
                            int64_t rank, const char* front) {
  const RankList dp_cp = grids.group_of(GroupKind::dp_cp, rank);
  for (const NamedParameter& param : parameters) {
    if (!param.tensor.requires_grad()) continue;
    param.description.validate(param.name);
    require_partial_sums(param, grids);
    for (const MeshAxis axis : partial_axes(param.description, grids))
      refuse_partial(param, axis, front);
    const GroupKind kind = replicas(param.description);
    if (kind == GroupKind::dp_cp) continue;
    const RankList ranks = grids.group_of(kind, rank);
    require<UsageError>(ranks == dp_cp,
                        "{}: the gradient of '{}' is reduced over {} [{}], allowed: the ranks of "
                        "dp-cp [{}]; {}",
                        front, param.name, to_string(kind), fmt::join(ranks, ", "),
                        fmt::join(dp_cp, ", "), kOtherFronts);
  }
  refuse_ties(parameters, grids, front);
}

void require_no_model_axes(const std::vector<NamedParameter>& parameters, const char* front) {
  const auto refuse = [&](const NamedParameter& param, const std::string& what) {
    fail<UsageError>(
        "{}: parameter '{}' is {}, and a group alone does not show what that "
        "requires; give the module and the ParallelState instead",
        front, param.name, what);
  };
  for (const NamedParameter& param : parameters) {
    if (!param.tensor.requires_grad()) continue;
    param.description.validate(param.name);
    for (const MeshAxis axis : model_axes(param.description))
      if (param.description.gradient_state(axis) != GradientState::complete)
        refuse(param,
               fmt::format("declared {} over {}", to_string(param.description.gradient_state(axis)),
                           to_string(axis)));
    if (replicas(param.description) != GroupKind::dp_cp) refuse(param, "an expert");
    if (param.description.tie) refuse(param, fmt::format("tied '{}'", param.description.tie->name));
  }
}

}  // namespace lockstep
