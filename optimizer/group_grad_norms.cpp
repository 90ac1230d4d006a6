#include "lockstep/optimizer/group_grad_norms.h"

#include <algorithm>
#include <set>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/text_fields.h"
#include "lockstep/distributed/notify_on_error.h"

namespace lockstep {
namespace {

constexpr const char* kCaller = "GroupGradNorms";

const ParallelState& state_of(const Optimizer& optimizer) {
  return optimizer.models().front()->parallel_state();
}

std::vector<std::string> names_of_groups(const Optimizer& optimizer) {
  const std::vector<ParamGroup>& groups = optimizer.param_groups();
  std::vector<std::string> names;
  for (const ParamGroup& group : groups) names.push_back(name_of(group, groups.front()));
  return names;
}

/// The names on all ranks; the first of `own` comes first.
std::vector<std::string> gathered(const ParallelState& state, const std::vector<std::string>& own) {
  constexpr const char* kLabel = "parameter groups";
  std::string mine;
  for (const std::string& name : own) append_field(mine, name);
  std::set<std::string> others;
  for (const std::string& text : all_gather_texts(state.world(), mine, kLabel))
    for (std::string_view rest = text; !rest.empty();) others.emplace(take_field(rest, kLabel));
  others.erase(own.front());
  std::vector<std::string> names = {own.front()};
  names.insert(names.end(), others.begin(), others.end());
  return names;
}

}  // namespace

GroupGradNorms::GroupGradNorms(const Optimizer& optimizer) : optimizer_(optimizer) {
  const std::vector<std::string> own = names_of_groups(optimizer);
  names_ = gathered(state_of(optimizer), own);
  for (const std::string& name : names_) {
    std::vector<bool> chosen;
    for (const size_t group : optimizer.group_of_params()) chosen.push_back(own[group] == name);
    counted_.emplace_back(optimizer.models(), Gaps::included, kCaller, chosen);
  }
}

at::Tensor GroupGradNorms::norms() const {
  const at::NoGradGuard no_grad;
  const ParallelState& state = state_of(optimizer_);
  const auto zero = at::zeros({}, at::TensorOptions(state.device()).dtype(at::kDouble));
  std::vector<std::vector<at::Tensor>> of_class;
  for (const CountedRanges& counted : counted_) {
    const PieceClasses classes = notify_on_error(state, [&] { return counted.grads(kCaller); });
    of_class.resize(classes.size());
    for (size_t i = 0; i < classes.size(); ++i) {
      at::Tensor total = zero.clone();
      for (const at::Tensor& piece : classes[i]) total += sum_of_squares(piece);
      of_class[i].push_back(std::move(total));
    }
  }
  std::vector<at::Tensor> stacked;
  for (const auto& of_groups : of_class) stacked.push_back(at::stack(of_groups));
  return combine_over_model(optimizer_.models(), stacked, ReduceOp::sum, "gradient norms of groups")
             .sqrt() /
         optimizer_.loss_scale();
}

}  // namespace lockstep
