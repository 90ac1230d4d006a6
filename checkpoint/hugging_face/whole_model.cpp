#include "lockstep/checkpoint/whole_model.h"

#include "lockstep/checkpoint/hugging_face_names.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/expert_rules.h"
#include "lockstep/models/gpt_params.h"
#include "lockstep/planner/stage_shapes.h"

namespace lockstep {

Config whole_config(Config config) {
  config.parallel = {};
  return resolve(config);
}

std::vector<WholeParameter> whole_parameters(const Config& config) {
  const ModelChunk whole = {
      .num_layers = config.model.num_layers, .has_embedding = true, .has_output = true};
  std::vector<WholeParameter> parameters;
  for (const ShapedParameter& param : chunk_parameters(config, whole)) {
    WholeParameter one{param.name, param.shape};
    if (const auto& rows = param.description.unpadded_rows) one.shape.front() = *rows;
    parameters.push_back(std::move(one));
  }
  if (!config.model.moe_router_enable_expert_bias) return parameters;
  for (int64_t layer = 0; layer < config.model.num_layers; ++layer)
    if (has_experts(config.model, layer))
      parameters.push_back({expert_bias_name(layer), {*config.model.num_experts}, true});
  return parameters;
}

std::vector<AdaptedLinear> whole_adapters(const Config& config) {
  const LayerSettings settings = {.config = config.model, .lora = config.lora};
  return adapted_linears(gpt_params(settings, GPTStage::whole(config.model)));
}

}  // namespace lockstep
