#include "lockstep/checkpoint/hugging_face_rope.h"

#include <cmath>
#include <optional>
#include <string>

#include "lockstep/core/attention_rules.h"

namespace lockstep {
namespace {

using OrderedJson = nlohmann::ordered_json;

/// Sets rope_mscale so that cosines and sines get the factor `amplitude`.
void set_amplitude(const JsonKeys& keys, double amplitude, TransformerConfig& model) {
  constexpr double kRounding = 1e-12;
  const double factor = model.rope_scaling_factor;
  const double wanted = amplitude * yarn_mscale(factor, model.rope_mscale_all_dim) - 1;
  const double of_one = yarn_mscale(factor, 1) - 1;
  const bool good = wanted > -kRounding && (of_one > 0 || wanted < kRounding);
  keys.check(good, "attention_factor", amplitude,
             of_one > 0 ? "1 or more, times what mscale_all_dim divides by" : "1 with this factor");
  model.rope_mscale = wanted < kRounding ? 0 : wanted / of_one;
}

/// transformers prefers a value beside the rotary parameters to the one inside them.
int64_t original_context(const JsonKeys& keys, const JsonKeys& rope,
                         std::optional<int64_t> otherwise) {
  const char* const key = "original_max_position_embeddings";
  return keys.has(key) ? keys.size(key) : rope.size(key, otherwise);
}

/// In transformers, only DeepSeek's family scales the logits; the others scale cosines and sines.
void parse_yarn(const JsonKeys& keys, const JsonKeys& rope, bool scales_logits,
                TransformerConfig& model) {
  model.rope_scaling_type = RopeScaling::yarn;
  model.rope_original_max_position_embeddings =
      original_context(keys, rope, keys.size("max_position_embeddings"));
  rope.allow("truncate", true, true);
  model.rope_beta_fast = rope.get<double>("beta_fast", model.rope_beta_fast);
  model.rope_beta_slow = rope.get<double>("beta_slow", model.rope_beta_slow);
  const double weight = rope.get<double>("mscale", 0.0);
  const double all = rope.get<double>("mscale_all_dim", 0.0);
  const double factor = model.rope_scaling_factor;
  const bool both = weight != 0 && all != 0;
  rope.check(all >= 0, "mscale_all_dim", all, ">= 0");
  if (scales_logits) model.rope_mscale_all_dim = all;
  if (rope.has("attention_factor"))
    set_amplitude(rope, rope.get<double>("attention_factor"), model);
  else if (both && scales_logits)
    model.rope_mscale = weight;
  else if (both)
    set_amplitude(rope, yarn_mscale(factor, weight) / yarn_mscale(factor, all), model);
  else if (model.rope_mscale_all_dim != 0)
    set_amplitude(rope, yarn_mscale(factor, 1), model);
}

void parse_llama3(const JsonKeys& keys, const JsonKeys& rope, TransformerConfig& model) {
  model.rope_scaling_type = RopeScaling::llama3;
  model.rope_low_freq_factor = rope.get<double>("low_freq_factor");
  model.rope_high_freq_factor = rope.get<double>("high_freq_factor");
  model.rope_original_max_position_embeddings = original_context(keys, rope, {});
}

}  // namespace

void parse_hugging_face_rope(const JsonKeys& keys, const HuggingFaceFamilyInfo& info,
                             TransformerConfig& model) {
  model.rotary_base = keys.get<double>("rope_theta", info.rope_theta);
  for (const char* const name : {"rope_scaling", "rope_parameters"}) {
    if (!keys.has(name) || keys.is_empty(name)) continue;
    const JsonKeys rope = keys.object(name);
    const char* const type = rope.has("type") && !rope.has("rope_type") ? "type" : "rope_type";
    const auto found = rope.get<std::string>(type, "default");
    rope.check(found == "default" || found == "linear" || found == "llama3" || found == "yarn",
               type, found, "default, linear, llama3, yarn");
    model.rotary_base = rope.get<double>("rope_theta", model.rotary_base);
    rope.allow("partial_rotary_factor", 1.0, 1.0);
    if (found == "default") return;
    model.rope_scaling_factor = rope.get<double>("factor");
    const bool latent = info.family == HuggingFaceFamily::deepseek_v3;
    if (found == "yarn") return parse_yarn(keys, rope, latent, model);
    if (latent) rope.allow("mscale_all_dim", 0.0, 0.0);
    if (found == "llama3") return parse_llama3(keys, rope, model);
    model.rope_scaling_type = RopeScaling::linear;
    return;
  }
}

OrderedJson hugging_face_rope_scaling(const TransformerConfig& model) {
  const RopeScaling type = model.rope_scaling_type;
  if (type == RopeScaling::none) return nullptr;
  OrderedJson json = {{"rope_type", to_string(type)}, {"factor", model.rope_scaling_factor}};
  if (type == RopeScaling::linear) return json;
  if (type == RopeScaling::llama3) {
    json["low_freq_factor"] = model.rope_low_freq_factor;
    json["high_freq_factor"] = model.rope_high_freq_factor;
  }
  json["original_max_position_embeddings"] = model.rope_original_max_position_embeddings;
  if (type == RopeScaling::llama3) return json;
  json["beta_fast"] = model.rope_beta_fast;
  json["beta_slow"] = model.rope_beta_slow;
  const double weight = model.rope_mscale, all = model.rope_mscale_all_dim;
  if (all != 0) json["mscale_all_dim"] = all;
  if (all != 0 && weight != 0)
    json["mscale"] = weight;
  else if (all != 0 || weight != 1)
    json["attention_factor"] = rotary_amplitude(model);
  return json;
}

}  // namespace lockstep
