#pragma once

#include <string>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/core/param_spec.h"

/// The parameters of low-rank adapters (Hu et al., "LoRA", 2021) as data. Nothing here needs
/// libtorch.
namespace lockstep {

/// The adapters of the linear layers of `base` that lora.target_modules names, in a tree with only
/// the modules of `base` above those layers: `lora_A` [rank, in] and `lora_B` [out..., rank] next
/// to a `weight` [out..., in].
///
/// If tp cuts the rows of the weight, lora_B is cut in the same way and lora_A is on every rank; if
/// it cuts the columns, lora_A is cut in the same way and lora_B is on every rank. The gradient of
/// the one that is on every rank is in state `replicated` over tp, as LayerSettings gives it: see
/// LowRankAdapter. lora_A starts as normal values of standard deviation sqrt(1 / (3 in)), that of
/// the Kaiming uniform values in nn.Linear and in peft; lora_B starts as zero.
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

/// The layers below `module`. `prefix`: the name of `module`; it ends in "." or is empty.
std::vector<AdaptedLinear> adapted_linears(const ModuleSpec& module,
                                           const std::string& prefix = {});

}  // namespace lockstep
