#include "lockstep/models/gpt_params.h"

#include <string>

#include "lockstep/models/adapter_params.h"

namespace lockstep {

TableUse table_use(const TransformerConfig& config, const GPTStage& stage) {
  if (config.untie_embeddings_and_output_weights) return TableUse::one_way;
  return stage.has_embedding && stage.has_loss ? TableUse::both_ways : TableUse::other_stage;
}

ModuleSpec transformer_block_params(const LayerSettings& settings, const GPTStage& stage) {
  ModuleSpec layers;
  LayerSettings each = settings;
  for (int64_t i = stage.first_layer; i < stage.first_layer + stage.num_layers; ++i) {
    each.layer = i;
    layers.add_child(std::to_string(i), transformer_layer_params(each));
  }
  ModuleSpec spec;
  spec.add_child("layers", std::move(layers));
  if (stage.has_loss) spec.add_child("final_layernorm", norm_params(settings));
  return spec;
}

namespace {

/// All parameters except adapters.
ModuleSpec base_params(const LayerSettings& settings, const GPTStage& stage) {
  const TableUse use = table_use(settings.config, stage);
  ModuleSpec spec;
  if (stage.has_embedding)
    spec.add_child("embedding", language_model_embedding_params(settings, use));
  spec.add_child("decoder", transformer_block_params(settings, stage));
  if (!stage.has_loss || use == TableUse::both_ways) return spec;
  ModuleSpec table = vocab_parallel_embedding_params(settings, use);
  if (use == TableUse::one_way) {
    spec.add_child("output_layer", std::move(table));
    return spec;
  }
  ModuleSpec copy;
  copy.add_child("word_embeddings", std::move(table));
  spec.add_child("embedding", std::move(copy));
  return spec;
}

ModuleSpec adapters(const ModuleSpec& base, const LayerSettings& settings) {
  return adapter_params(base, settings.lora, settings.replicated_gradient_state());
}

}  // namespace

ModuleSpec gpt_params(const LayerSettings& settings, const GPTStage& stage) {
  ModuleSpec spec = base_params(settings, stage);
  if (settings.lora.rank) add_params(spec, adapters(spec, settings));
  return spec;
}

ModuleSpec trained_params(const LayerSettings& settings, const GPTStage& stage) {
  const ModuleSpec spec = base_params(settings, stage);
  return settings.lora.rank ? adapters(spec, settings) : spec;
}

}  // namespace lockstep
