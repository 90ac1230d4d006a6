#include "lockstep/planner/stage_shapes.h"

#include <set>

#include "lockstep/core/integers.h"
#include "lockstep/core/tensor_parallel_rules.h"
#include "lockstep/distributed/model_units.h"
#include "lockstep/parallel_state/parallel_axes.h"
#include "lockstep/planner/pipeline_plan.h"

namespace lockstep {
namespace {

int64_t divided(int64_t value, int64_t ranks, const char* field) {
  return div_exact(value, ranks, field, "parallel.tensor_model_parallel_size");
}

/// The place of the first rank on every axis that cuts a layer.
MeshPlace first_place(const ParallelConfig& parallel) {
  return [&parallel](MeshAxis axis) -> AxisPlace {
    const ParallelSize* const size = chosen_size(axis);
    return {0, size ? size->of(parallel) : 1};
  };
}

ModuleTree tree_of(const ModuleSpec& spec) {
  ModuleTree tree{.numbered = is_number(spec.name),
                  .num_params = static_cast<int64_t>(spec.params.size()),
                  .children = {}};
  for (const ModuleSpec& child : spec.children) tree.children.push_back(tree_of(child));
  return tree;
}

}  // namespace

int64_t ShapedParameter::numel() const {
  int64_t numel = 1;
  for (const int64_t size : shape) numel = checked_mul(numel, size, "parameter '" + name + "'");
  return numel;
}

LocalWidths local_widths(const Config& config) {
  const TransformerConfig& model = config.model;
  const int64_t ranks = config.parallel.tensor_model_parallel_size;
  const int64_t groups = *model.num_query_groups;
  const bool shared_groups = groups < ranks && ranks % groups == 0;
  return {.heads = divided(model.num_attention_heads, ranks, "model.num_attention_heads"),
          .groups = shared_groups ? 1 : divided(groups, ranks, "model.num_query_groups"),
          .ffn = divided(*model.ffn_hidden_size, ranks, "model.ffn_hidden_size"),
          .vocabulary = padded_vocab_size(model, ranks) / ranks};
}

std::vector<ModelChunk> chunks_of_stage(const Config& config, int64_t stage) {
  const StageLayout layout = stage_layout(config);
  std::vector<ModelChunk> chunks;
  for (int64_t c = 0; c < layout.chunks(); ++c) {
    const LayerRange layers = layout.layers(stage, c);
    chunks.push_back({.first_layer = layers.begin,
                      .num_layers = layers.size(),
                      .has_embedding = layout.has_embedding(stage, c),
                      .has_output = layout.has_loss(stage, c)});
  }
  return chunks;
}

std::vector<ShapedParameter> chunk_parameters(const Config& config, const ModelChunk& chunk) {
  local_widths(config);  // reports the fields that do not divide
  const ParallelConfig& parallel = config.parallel;
  const LayerSettings settings = {config.model, parallel.tensor_model_parallel_size,
                                  parallel.sequence_parallel, /*layer=*/0, config.lora};
  const MeshPlace place = first_place(parallel);
  std::set<std::string> trained;
  for (const ParamSpec& spec : trained_params(settings, chunk.stage()).all())
    trained.insert(spec.name);
  std::vector<ShapedParameter> list;
  const ModuleSpec model = gpt_params(settings, chunk.stage());
  const std::vector<int64_t> units = number_units(tree_of(model));
  for (const ParamSpec& spec : model.all())
    list.push_back({spec.name, local_piece(spec, place).shape, spec.description,
                    trained.contains(spec.name), units[list.size()]});
  return list;
}

std::vector<ShapedParameter> model_parameters(const Config& config) {
  Config whole = config;
  whole.parallel = {};
  return chunk_parameters(whole, chunks_of_stage(whole, /*stage=*/0).front());
}

int64_t num_parameters(const Config& config) {
  int64_t numel = 0;
  for (const ShapedParameter& param : model_parameters(config))
    numel = checked_add(numel, param.numel(), "parameters");
  return numel;
}

int64_t num_trained_parameters(const Config& config) {
  int64_t numel = 0;
  for (const ShapedParameter& param : model_parameters(config))
    if (param.trained) numel = checked_add(numel, param.numel(), "parameters");
  return numel;
}

int64_t num_expert_parameters(const Config& config) {
  int64_t numel = 0;
  for (const ShapedParameter& param : model_parameters(config))
    if (param.description.is_expert) numel = checked_add(numel, param.numel(), "parameters");
  return numel;
}

int64_t num_active_parameters(const Config& config) {
  if (!config.model.num_experts) return num_parameters(config);
  const int64_t experts = *config.model.num_experts;
  return num_parameters(config) -
         num_expert_parameters(config) / experts * (experts - config.model.moe_router_topk);
}

}  // namespace lockstep
