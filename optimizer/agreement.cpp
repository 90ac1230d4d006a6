#include "lockstep/optimizer/agreement.h"

#include <array>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/distributed/parameter_check.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

constexpr std::array kAllRanks = {GroupKind::dp_cp, GroupKind::tp, GroupKind::pp};

std::vector<ConfigValue> optimizer_settings(const OptimizerConfig& config) {
  Config whole;
  whole.optimizer = config;
  std::vector<ConfigValue> settings = config_values(whole);
  std::erase_if(settings,
                [](const ConfigValue& field) { return !field.path.starts_with("optimizer."); });
  return settings;
}

}  // namespace

void check_same_optimizer(const ParallelState& state, const OptimizerConfig& config,
                          const std::function<void()>& own_checks) {
  const std::vector<ConfigValue> settings = optimizer_settings(config);
  for (const GroupKind kind : kAllRanks) {
    const ProcessGroup group = state.group(kind);
    try {
      check_same_parameters({}, group, settings, own_checks);
    } catch (const Error& error) {
      if (group.size() < state.world_size()) state.post_failure(error.what());
      throw;
    }
  }
}

bool any_rank(const ParallelState& state, bool own, const char* label) {
  const at::Tensor flag =
      at::full({}, own ? 1. : 0., at::TensorOptions(state.device()).dtype(at::kDouble));
  for (const GroupKind kind : kAllRanks)
    all_reduce(state.group(kind), flag, ReduceOp::max, label).wait();
  return flag.item<double>() > 0;
}

}  // namespace lockstep
