#pragma once

#include <string>
#include <vector>

#include "lockstep/core/config.h"

/// The requirements of low-rank adapters on a configuration. Nothing here needs libtorch.
namespace lockstep {

/// The layers that get adapters if lora.target_modules is empty: those of attention, as in the
/// paper (Hu et al., "LoRA", 2021).
std::vector<std::string> default_lora_targets();

/// Throws ConfigError, naming the field: fields of `lora` without lora.rank; a module that has no
/// adapters; linear_fc1 or linear_fc2 in a model with num_experts, whose experts have none;
/// multi_latent_attention, whose layers have none. `config` is resolved.
void check_lora(const Config& config);

/// Throws ConfigError if optimizer.decoupled_lr is set beside lora.rank, which freezes the layers
/// of that rate. Earlier versions trained with both, so check_lora() accepts them.
void check_decoupled_lr_in_use(const Config& config);

}  // namespace lockstep
