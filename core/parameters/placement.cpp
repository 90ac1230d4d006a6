#include "lockstep/core/placement.h"

#include <algorithm>

#include "lockstep/core/check.h"

namespace lockstep {

const char* to_string(MeshAxis axis) {
  switch (axis) {
    case MeshAxis::tp:
      return "tp";
    case MeshAxis::cp:
      return "cp";
    case MeshAxis::dp:
      return "dp";
    case MeshAxis::pp:
      return "pp";
    case MeshAxis::etp:
      return "etp";
    case MeshAxis::ep:
      return "ep";
    case MeshAxis::edp:
      return "edp";
  }
  return "";
}

bool splits_batch(MeshAxis axis) {
  return axis == MeshAxis::dp || axis == MeshAxis::cp || axis == MeshAxis::edp;
}

const char* to_string(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return "sum";
    case ReduceOp::average:
      return "average";
    case ReduceOp::max:
      return "max";
    case ReduceOp::min:
      return "min";
  }
  return "";
}

const char* to_string(GradientState state) {
  switch (state) {
    case GradientState::complete:
      return "complete";
    case GradientState::partial_sum:
      return "partial-sum";
    case GradientState::undeclared:
      return "undeclared";
    case GradientState::partial_mean:
      return "partial-mean";
  }
  return "";
}

const char* to_string(TiedStages stages) {
  switch (stages) {
    case TiedStages::all:
      return "all stages";
    case TiedStages::first_and_last:
      return "the first and the last stage";
    case TiedStages::first:
      return "the first stage";
  }
  return "";
}

std::string to_string(const Placement& placement) {
  if (const auto* shard = std::get_if<Shard>(&placement))
    return fmt::format("Shard({})", shard->dim);
  if (const auto* partial = std::get_if<Partial>(&placement))
    return fmt::format("Partial({})",
                       partial->op == ReduceOp::avg ? "avg" : to_string(partial->op));
  return "Replicate";
}

std::string to_string(const std::vector<Placement>& placements) {
  std::string text;
  for (const Placement& placement : placements)
    text += (text.empty() ? "" : ", ") + to_string(placement);
  return "(" + text + ")";
}

Placement ParamDescription::placement(MeshAxis axis) const {
  const auto found = placements.find(axis);
  return found == placements.end() ? Placement(Replicate{}) : found->second;
}

GradientState ParamDescription::gradient_state(MeshAxis axis) const {
  const auto found = gradient_states.find(axis);
  return found == gradient_states.end() ? default_gradient_state(axis) : found->second;
}

GradientState ParamDescription::default_gradient_state(MeshAxis axis) const {
  return lives_on(axis) && splits_batch(axis) ? GradientState::partial_sum
                                              : GradientState::complete;
}

std::array<MeshAxis, 4> ParamDescription::axes() const {
  using enum MeshAxis;
  return is_expert ? std::array{etp, ep, edp, pp} : std::array{tp, cp, dp, pp};
}

bool ParamDescription::lives_on(MeshAxis axis) const {
  const auto list = axes();
  return std::find(list.begin(), list.end(), axis) != list.end();
}

bool ParamDescription::is_on_all_stages() const {
  return stages == StageCopies::all || gradient_state(MeshAxis::pp) != GradientState::complete;
}

void ParamDescription::validate(std::string_view parameter) const {
  const auto check_axis = [&](MeshAxis axis) {
    require<UsageError>(lives_on(axis), "parameter '{}': found a description over {}, allowed: {}",
                        parameter, lockstep::to_string(axis),
                        is_expert ? "etp, ep, edp, pp (an expert)" : "tp, cp, dp, pp (no expert)");
  };
  for (const auto& [axis, weight] : placements) {
    check_axis(axis);
    require<UsageError>(!std::holds_alternative<Partial>(weight),
                        "parameter '{}': found {} over {}, allowed: Replicate, Shard", parameter,
                        lockstep::to_string(weight), lockstep::to_string(axis));
    require<UsageError>(
        std::holds_alternative<Replicate>(weight) || !(splits_batch(axis) || axis == MeshAxis::pp),
        "parameter '{}': found {} over {}, allowed: Replicate; only tp, etp and ep cut parameters",
        parameter, lockstep::to_string(weight), lockstep::to_string(axis));
  }
  for (const auto& [axis, gradient] : gradient_states) {
    check_axis(axis);
    require<UsageError>(
        gradient != GradientState::undeclared,
        "parameter '{}': its module does not declare the state of its gradient over {}, which "
        "sequence parallelism needs; register the module with register_described_module(), with "
        "GradientState::partial_sum if each rank sees different tokens and complete if all see the "
        "same",
        parameter, lockstep::to_string(axis));
    const bool whole = !std::holds_alternative<Shard>(placement(axis));
    require<UsageError>(
        gradient == default_gradient_state(axis) || whole,
        "parameter '{}': found {} over {} with a gradient that is {} there, allowed: {}", parameter,
        lockstep::to_string(placement(axis)), lockstep::to_string(axis),
        lockstep::to_string(gradient), lockstep::to_string(default_gradient_state(axis)));
  }
  for (const int64_t rows : rows_of_matrices)
    require<UsageError>(rows >= 1, "parameter '{}': found blocks of {} rows, allowed: >= 1 of each",
                        parameter, fmt::join(rows_of_matrices, " + "));
  if (!tie) return;
  require<UsageError>(!tie->name.empty(), "parameter '{}': found a tie without a name", parameter);
  require<UsageError>(gradient_state(MeshAxis::pp) == GradientState::complete,
                      "parameter '{}': found a tie, '{}', and a gradient that is {} over pp, "
                      "allowed: one of the two",
                      parameter, tie->name, lockstep::to_string(gradient_state(MeshAxis::pp)));
  require<UsageError>(
      !is_on_all_stages(),
      "parameter '{}': found a tie, '{}', and copies on all stages, allowed: one of "
      "the two",
      parameter, tie->name);
}

std::string ParamDescription::to_string() const {
  std::string text = is_expert ? "expert" : "dense";
  for (const MeshAxis axis : axes()) {
    if (placement(axis) != Placement(Replicate{}))
      text += fmt::format(", {} over {}", lockstep::to_string(placement(axis)),
                          lockstep::to_string(axis));
    if (gradient_state(axis) != GradientState::complete)
      text += fmt::format(", {} over {}", lockstep::to_string(gradient_state(axis)),
                          lockstep::to_string(axis));
  }
  if (stages == StageCopies::all && gradient_state(MeshAxis::pp) == GradientState::complete)
    text += ", on all stages";
  if (tie) text += fmt::format(", tied '{}' on {}", tie->name, lockstep::to_string(tie->stages));
  if (unpadded_rows) text += fmt::format(", {} rows before padding", *unpadded_rows);
  if (!rows_of_matrices.empty())
    text += fmt::format(", blocks of {} rows", fmt::join(rows_of_matrices, " + "));
  if (is_embedding_or_output) text += ", embedding or output layer";
  if (update == ParamUpdate::matrix) text += ", updated as a matrix";
  return text + (apply_weight_decay ? "" : ", no weight decay");
}

}  // namespace lockstep
