#include "lockstep/core/lora_rules.h"

#include <algorithm>
#include <iterator>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

constexpr const char* kTargets[] = {"linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"};

void check_unused(const LoraConfig& lora) {
  const LoraConfig unused;
  const auto check = [](bool is_unused, const char* field, const auto& found) {
    require<ConfigError>(is_unused, "lora.{}: found {}, but lora.rank is not set", field, found);
  };
  check(lora.target_modules.empty(), "target_modules",
        fmt::format("{}", fmt::join(lora.target_modules, ", ")));
  check(lora.alpha == unused.alpha, "alpha", lora.alpha);
  check(lora.dropout == unused.dropout, "dropout", lora.dropout);
}

void check_target(const std::string& target, const TransformerConfig& model) {
  require<ConfigError>(
      std::find(std::begin(kTargets), std::end(kTargets), target) != std::end(kTargets),
      "lora.target_modules: found '{}', allowed: {}", target, fmt::join(kTargets, ", "));
  const auto attention = default_lora_targets();
  require<ConfigError>(
      !model.num_experts ||
          std::find(attention.begin(), attention.end(), target) != attention.end(),
      "lora.target_modules: found {}, allowed with model.num_experts: {}; experts have no adapters",
      target, fmt::join(attention, ", "));
}

}  // namespace

std::vector<std::string> default_lora_targets() { return {"linear_qkv", "linear_proj"}; }

void check_lora(const Config& config) {
  const LoraConfig& lora = config.lora;
  if (!lora.rank) return check_unused(lora);
  require<ConfigError>(!config.model.multi_latent_attention,
                       "lora.rank: found {}, allowed with model.multi_latent_attention: unset; its "
                       "layers have no adapters",
                       *lora.rank);
  for (auto it = lora.target_modules.begin(); it != lora.target_modules.end(); ++it) {
    check_target(*it, config.model);
    require<ConfigError>(std::find(lora.target_modules.begin(), it, *it) == it,
                         "lora.target_modules: found {} twice, allowed: each name once", *it);
  }
}

void check_decoupled_lr_in_use(const Config& config) {
  require<ConfigError>(!config.lora.rank || !config.optimizer.decoupled_lr,
                       "optimizer.decoupled_lr: found {}, allowed with lora.rank: unset, because "
                       "the embeddings and the output layer are frozen",
                       config.optimizer.decoupled_lr.value_or(0));
}

}  // namespace lockstep
