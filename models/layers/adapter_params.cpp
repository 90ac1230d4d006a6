#include "lockstep/models/adapter_params.h"

#include <algorithm>
#include <cmath>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

constexpr const char *kWeight = "weight", *kA = "lora_A", *kB = "lora_B";

bool is_target(const LoraConfig& lora, const std::string& module) {
  return std::find(lora.target_modules.begin(), lora.target_modules.end(), module) !=
         lora.target_modules.end();
}

ModuleSpec adapter_of(const ParamSpec& weight, int64_t rank, GradientState replicated,
                      const std::string& module) {
  require<UsageError>(weight.description.lives_on(MeshAxis::tp),
                      "module '{}': found an adapter for experts, allowed: dense layers", module);
  const auto columns = static_cast<int64_t>(weight.shape.size()) - 1;
  const Placement cut = weight.description.placement(MeshAxis::tp);
  const auto* const shard = std::get_if<Shard>(&cut);
  const ParamDescription everywhere = {.gradient_states = {{MeshAxis::tp, replicated}},
                                       .update = ParamUpdate::matrix};
  ParamDescription of_a = everywhere, of_b = everywhere;
  if (shard != nullptr) {
    ParamDescription& of_cut = shard->dim == columns ? of_a : of_b;
    of_cut.gradient_states = {};
    of_cut.placements = {{MeshAxis::tp, Shard{shard->dim == columns ? 1 : shard->dim}}};
  }
  of_b.rows_of_matrices = weight.description.rows_of_matrices;
  const int64_t in = weight.shape.back();
  std::vector<int64_t> shape_of_b = weight.shape;
  shape_of_b.back() = rank;
  ModuleSpec spec;
  spec.add({kA, {rank, in}, NormalValues{std::sqrt(1 / (3.0 * static_cast<double>(in)))}, of_a});
  spec.add({kB, std::move(shape_of_b), ConstantValue{0}, of_b});
  return spec;
}

}  // namespace

ModuleSpec adapter_params(const ModuleSpec& base, const LoraConfig& lora,
                          GradientState replicated) {
  ModuleSpec spec;
  spec.name = base.name;
  const ParamSpec* const weight = base.find(kWeight);
  if (weight != nullptr && is_target(lora, base.name))
    spec.params = adapter_of(*weight, *lora.rank, replicated, base.name).params;
  for (const ModuleSpec& child : base.children) {
    ModuleSpec below = adapter_params(child, lora, replicated);
    if (!below.params.empty() || !below.children.empty()) spec.children.push_back(std::move(below));
  }
  return spec;
}

void add_params(ModuleSpec& to, const ModuleSpec& more) {
  to.params.insert(to.params.end(), more.params.begin(), more.params.end());
  for (const ModuleSpec& child : more.children) {
    const auto found =
        std::find_if(to.children.begin(), to.children.end(),
                     [&](const ModuleSpec& candidate) { return candidate.name == child.name; });
    require<UsageError>(found != to.children.end(),
                        "module '{}': found no child '{}' for more parameters", to.name,
                        child.name);
    add_params(*found, child);
  }
}

std::vector<AdaptedLinear> adapted_linears(const ModuleSpec& module, const std::string& prefix) {
  std::vector<AdaptedLinear> list;
  if (module.find(kA) != nullptr) list.push_back({prefix + kWeight, prefix + kA, prefix + kB});
  for (const ModuleSpec& child : module.children) {
    const auto below = adapted_linears(child, prefix + child.name + ".");
    list.insert(list.end(), below.begin(), below.end());
  }
  return list;
}

}  // namespace lockstep
