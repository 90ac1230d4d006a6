#include "lockstep/core/followers.h"

#include <algorithm>

#include "lockstep/core/config_rules.h"

namespace lockstep {

void forget_followers(const std::vector<std::string>& overrides, proto::Config* config) {
  const auto named = [&](const std::string& path) {
    return std::any_of(overrides.begin(), overrides.end(), [&](const std::string& assignment) {
      return assignment.starts_with(path + "=");
    });
  };
  proto::OptimizerConfig& optimizer = *config->mutable_optimizer();
  const double decay = optimizer.weight_decay();
  const bool both = optimizer.has_start_weight_decay() && optimizer.has_end_weight_decay() &&
                    optimizer.start_weight_decay() == decay &&
                    optimizer.end_weight_decay() == decay;
  if (both && named("optimizer.weight_decay")) {
    if (!named("optimizer.start_weight_decay")) optimizer.clear_start_weight_decay();
    if (!named("optimizer.end_weight_decay")) optimizer.clear_end_weight_decay();
  }
  if (named("data.valid_path") && !named("data.split") &&
      config->data().split() == split_of(DataConfig()))
    config->mutable_data()->clear_split();
}

}  // namespace lockstep
