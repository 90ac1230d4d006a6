#include "lockstep/optimizer/agreement.h"

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/distributed/notify_on_error.h"
#include "lockstep/distributed/parameter_check.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

std::string overrides_text(const std::vector<ParamOverride>& overrides) {
  std::string text;
  const auto add = [&](const char* name, const std::optional<double>& value) {
    if (value) text += fmt::format(" {} {}", name, *value);
  };
  for (const ParamOverride& numbers : overrides) {
    text += "[";
    add("max_lr", numbers.max_lr);
    add("min_lr", numbers.min_lr);
    add("wd_mult", numbers.wd_mult);
    text += " ]";
  }
  return text.empty() ? "none" : text;
}

std::vector<ConfigValue> optimizer_settings(const OptimizerConfig& config,
                                            const std::vector<ParamOverride>& overrides,
                                            const UpdateStatement* rule) {
  Config whole;
  whole.optimizer = config;
  std::vector<ConfigValue> settings = config_values(whole);
  std::erase_if(settings,
                [](const ConfigValue& field) { return !field.path.starts_with("optimizer."); });
  settings.push_back({"overrides", overrides_text(overrides)});
  settings.push_back({"update rule", rule ? to_string(*rule) : "that of optimizer.optimizer"});
  return settings;
}

}  // namespace

void check_same_optimizer(const ParallelState& state, const OptimizerConfig& config,
                          const std::vector<ParamOverride>& overrides, const UpdateStatement* rule,
                          const std::function<void()>& own_checks) {
  const std::vector<ConfigValue> settings = optimizer_settings(config, overrides, rule);
  for (const GroupKind kind : kinds_that_reach_all_ranks()) {
    const ProcessGroup group = state.group(kind);
    notify_outside_on_error(group, state,
                            [&] { check_same_parameters({}, group, settings, own_checks); });
  }
}

bool any_rank(const ParallelState& state, bool own, const char* label) {
  const at::Tensor flag =
      at::full({}, own ? 1. : 0., at::TensorOptions(state.device()).dtype(at::kDouble));
  for (const GroupKind kind : kinds_that_reach_all_ranks())
    all_reduce(state.group(kind), flag, ReduceOp::max, label).wait();
  return flag.item<double>() > 0;
}

}  // namespace lockstep
