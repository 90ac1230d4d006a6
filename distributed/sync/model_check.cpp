#include "lockstep/distributed/model_check.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/text_digest.h"
#include "lockstep/distributed/buffer_kind.h"
#include "lockstep/distributed/model_units.h"
#include "lockstep/distributed/notify_on_error.h"
#include "lockstep/distributed/parameter_check.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

using Parameters = std::vector<NamedParameter>;

template <class Predicate>
Parameters chosen(const Parameters& parameters, Predicate predicate) {
  Parameters result;
  std::copy_if(parameters.begin(), parameters.end(), std::back_inserter(result), predicate);
  return result;
}

std::vector<ConfigValue> with_units(std::vector<ConfigValue> settings,
                                    const std::vector<int64_t>& units) {
  settings.push_back(
      {"units of the parameters", fmt::format("{}", fmt::join(renumbered(units), " "))});
  return settings;
}

void check_over(GroupKind kind, const Parameters& parameters, const ParallelState& state,
                const std::vector<ConfigValue>& settings,
                const std::function<void()>& own_checks = {},
                const std::vector<MeshAxis>& cut_over = {}, const Parameters& buffers = {}) {
  const ProcessGroup group = state.group(kind);
  notify_outside_on_error(group, state, [&] {
    check_same_parameters(parameters, group, settings, own_checks, cut_over, buffers);
  });
}

bool has_ranks_of_dp_cp(GroupKind kind, const ParallelState& state) {
  const auto ranks = [&](GroupKind of) { return state.grids().group_of(of, state.rank()); };
  return ranks(kind) == ranks(GroupKind::dp_cp);
}

/// Checks what is reduced or broadcast over other ranks than dp-cp.
void check_other_replicas(const Parameters& parameters, const Parameters& buffers,
                          const ParallelState& state, const std::vector<ConfigValue>& settings) {
  for (const GroupKind kind : kReplicaKinds) {
    const auto of_kind = [&](const NamedParameter& param) {
      return replicas(param.description) == kind;
    };
    const Parameters reduced = chosen(parameters, of_kind);
    if (!reduced.empty() && !has_ranks_of_dp_cp(kind, state))
      check_over(kind, reduced, state, settings, {}, {}, chosen(buffers, of_kind));
  }
}

/// Checks what all ranks of `axis` hold: whether they train it and, if they hold it whole, whether
/// with weight decay.
void check_shared(const Parameters& parameters, MeshAxis axis, const ParallelState& state) {
  std::vector<NamedText> facts;
  for (const NamedParameter& param : parameters)
    if (param.description.lives_on(axis) &&
        param.description.gradient_state(axis) == GradientState::complete) {
      const bool cut = std::holds_alternative<Shard>(param.description.placement(axis));
      facts.push_back({param.name, cut ? trained_text(param) : settings_text(param)});
    }
  const ProcessGroup group = state.group(group_kind_of(axis));
  notify_outside_on_error(group, state, [&] { check_same_by_name(facts, group); });
}

/// Checks the parameters that are sent over `axis` after the data-parallel reduction or in an
/// update, and those that its ranks share.
void check_axis(const Parameters& parameters, const std::vector<int64_t>& units, MeshAxis axis,
                const ParallelState& state, const std::vector<ConfigValue>& settings,
                MatrixLayout matrices) {
  const RankGrids& grids = state.grids();
  if (grids.size(group_kind_of(axis)) == 1) return;
  const auto lives_there = [&](const NamedParameter& param) {
    return param.description.lives_on(axis);
  };
  const auto is_whole_matrix = [&](const NamedParameter& param) {
    return param.tensor.requires_grad() && lies_whole(param.description, matrices);
  };
  const bool gathers =
      std::any_of(parameters.begin(), parameters.end(), [&](const NamedParameter& param) {
        return axis == tensor_axis(param.description) && is_whole_matrix(param) &&
               std::holds_alternative<Shard>(param.description.placement(axis));
      });
  const auto is_alike = [&](const NamedParameter& param) {
    const bool partial = param.description.gradient_state(axis) != GradientState::complete;
    return lives_there(param) && (partial || (gathers && is_whole_matrix(param)));
  };
  std::vector<int64_t> units_alike;
  for (size_t i = 0; i < units.size(); ++i)
    if (is_alike(parameters[i])) units_alike.push_back(units[i]);
  check_over(group_kind_of(axis), chosen(parameters, is_alike), state,
             with_units(settings, units_alike));
  if (axis != MeshAxis::ep) check_shared(parameters, axis, state);
}

}  // namespace

void check_same_model(const Parameters& parameters, const Parameters& buffers,
                      const ParallelState& state, const std::vector<ConfigValue>& settings,
                      const std::vector<int64_t>& units, MatrixLayout matrices,
                      const std::function<void()>& own_checks) {
  std::vector<MeshAxis> cut_over(kAxesInsideReplicas.begin(), kAxesInsideReplicas.end());
  std::erase_if(cut_over,
                [&](MeshAxis axis) { return state.grids().size(group_kind_of(axis)) == 1; });
  const Parameters dense = chosen(buffers, [&](const NamedParameter& buffer) {
    return has_ranks_of_dp_cp(replicas(buffer.description), state);
  });
  const std::vector<ConfigValue> of_replicas = with_units(settings, units);
  check_over(GroupKind::dp_cp, parameters, state, of_replicas, own_checks, cut_over, dense);
  check_other_replicas(parameters, buffers, state, of_replicas);
  for (const MeshAxis axis : kCuttingAxes)
    check_axis(parameters, units, axis, state, settings, matrices);
}

void check_same_trained(const Parameters& parameters, const ParallelState& state) {
  const bool experts_differ = state.grids().size(GroupKind::ep) > 1;
  const auto compare = [&](GroupKind kind, bool of_experts) {
    std::vector<NamedText> facts;
    for (const NamedParameter& param : parameters)
      if (of_experts == (experts_differ && param.description.lives_on(MeshAxis::ep)))
        facts.push_back({param.name, trained_text(param)});
    const ProcessGroup group = state.group(kind);
    notify_outside_on_error(group, state, [&] { check_same_by_name(facts, group); });
  };
  compare(GroupKind::tp_dp_cp, /*of_experts=*/false);
  if (!experts_differ) return;
  for (const MeshAxis axis : {MeshAxis::etp, MeshAxis::edp})
    compare(group_kind_of(axis), /*of_experts=*/true);
}

bool same_over_axes(const std::string& text, const std::vector<MeshAxis>& axes,
                    const ParallelState& state) {
  const auto own = static_cast<int64_t>(text_digest(text));
  bool same = true;
  for (const MeshAxis axis : axes) {
    const ProcessGroup group = state.group(group_kind_of(axis));
    const at::Tensor said = at::empty({group.size(), 2}, at::kLong);
    all_gather(group, said.view(-1), at::tensor({own, int64_t{same}}, at::kLong),
               "layouts of buffers")
        .wait();
    same = same && said.eq(at::tensor({own, int64_t{1}}, at::kLong)).all().item<bool>();
  }
  return same;
}

}  // namespace lockstep
