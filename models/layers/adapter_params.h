#pragma once

#include <string>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/core/param_spec.h"

/// The parameters of low-rank adapters (Hu et al., "LoRA", 2021) as data. Nothing here needs
/// libtorch.
namespace lockstep {

/// What the linear layers of `base` with the names of lora.target_modules get, in a tree that has
/// the modules of `base` above them and nothing else: `lora_A` [rank, in] and `lora_B` [out...,
/// rank] beside a `weight` [out..., in].
///
/// Where tp cuts the rows of the weight, lora_B is cut as they are and lora_A is on every rank;
/// where it cuts the columns, lora_A is cut as they are and lora_B is on every rank. The gradient
/// of what is on every rank is in state `replicated` over tp, as of LayerSettings: see
/// LowRankAdapter. lora_A starts as normal values of the standard deviation sqrt(1 / (3 in)), the
/// one of Kaiming's uniform values in nn.Linear and in peft; lora_B starts as zero.
///
/// UsageError: a layer of experts among them.
ModuleSpec adapter_params(const ModuleSpec& base, const LoraConfig& lora, GradientState replicated);

/// Adds the parameters of `more` to those of the modules with the same names in `to`. UsageError:
/// `to` has no such module.
void add_params(ModuleSpec& to, const ModuleSpec& more);

/// Names of the parameters of one linear layer with an adapter.
struct AdaptedLinear {
  std::string weight;
  std::string a;
  std::string b;
};

/// Those below `module`, whose name is `prefix`, which ends in "." or is empty.
std::vector<AdaptedLinear> adapted_linears(const ModuleSpec& module,
                                           const std::string& prefix = {});

}  // namespace lockstep
