#include "lockstep/checkpoint/hugging_face_weights.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/hugging_face_families.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/core/check.h"
#include "lockstep/core/expert_rules.h"

namespace lockstep {
namespace {

/// How one tensor here becomes one or several there.
enum class Form {
  same,
  transposed,    ///< [out, in] -> [in, out]
  fused_qkv,     ///< group by group -> queries, keys, values, transposed where it is a matrix
  separate_qkv,  ///< group by group -> three tensors
  stacked        ///< several matrices below each other -> so many tensors
};

struct Rule {
  std::string ours;
  std::vector<std::string> theirs;
  Form form = Form::same;
};

using Names = std::vector<std::string>;

void add_gpt2_layer(std::vector<Rule>& rules, const std::string& ours, const std::string& theirs) {
  for (const std::string part : {"weight", "bias"}) {
    const bool matrix = part == "weight";
    const Form linear = matrix ? Form::transposed : Form::same;
    rules.push_back({ours + "input_layernorm." + part, {theirs + "ln_1." + part}});
    rules.push_back({ours + "self_attention.linear_qkv." + part,
                     {theirs + "attn.c_attn." + part},
                     Form::fused_qkv});
    rules.push_back(
        {ours + "self_attention.linear_proj." + part, {theirs + "attn.c_proj." + part}, linear});
    rules.push_back({ours + "pre_mlp_layernorm." + part, {theirs + "ln_2." + part}});
    rules.push_back({ours + "mlp.linear_fc1." + part, {theirs + "mlp.c_fc." + part}, linear});
    rules.push_back({ours + "mlp.linear_fc2." + part, {theirs + "mlp.c_proj." + part}, linear});
  }
}

void add_attention(std::vector<Rule>& rules, const TransformerConfig& model,
                   const std::string& ours, const std::string& theirs) {
  for (const std::string part : {"weight", "bias"}) {
    if (part == "bias" && !model.add_qkv_bias) continue;
    rules.push_back(
        {ours + "linear_qkv." + part,
         {theirs + "q_proj." + part, theirs + "k_proj." + part, theirs + "v_proj." + part},
         Form::separate_qkv});
  }
  rules.push_back({ours + "linear_proj.weight", {theirs + "o_proj.weight"}});
  if (!model.qk_layernorm) return;
  rules.push_back({ours + "q_layernorm.weight", {theirs + "q_norm.weight"}});
  rules.push_back({ours + "k_layernorm.weight", {theirs + "k_norm.weight"}});
}

/// Names of the three matrices of a gated feed-forward network, or of an expert.
struct GatedNames {
  const char* gate;
  const char* up;
  const char* down;
};

void add_experts(std::vector<Rule>& rules, const TransformerConfig& model, const std::string& ours,
                 const std::string& theirs, const GatedNames& names) {
  Names first, second;
  for (int64_t expert = 0; expert < *model.num_experts; ++expert) {
    const std::string one = fmt::format("{}experts.{}.", theirs, expert);
    first.push_back(one + names.gate + ".weight");
    first.push_back(one + names.up + ".weight");
    second.push_back(one + names.down + ".weight");
  }
  rules.push_back({ours + "router.weight", {theirs + "gate.weight"}});
  rules.push_back({ours + "experts.linear_fc1.weight", std::move(first), Form::stacked});
  rules.push_back({ours + "experts.linear_fc2.weight", std::move(second), Form::stacked});
}

void add_rotary_layer(std::vector<Rule>& rules, const TransformerConfig& model, int64_t layer,
                      const std::string& ours, const std::string& theirs) {
  constexpr GatedNames kProjections = {"gate_proj", "up_proj", "down_proj"};
  constexpr GatedNames kNumbers = {"w1", "w3", "w2"};
  rules.push_back({ours + "input_layernorm.weight", {theirs + "input_layernorm.weight"}});
  add_attention(rules, model, ours + "self_attention.", theirs + "self_attn.");
  rules.push_back(
      {ours + "pre_mlp_layernorm.weight", {theirs + "post_attention_layernorm.weight"}});
  const std::string mlp = theirs + "mlp.";
  if (!has_experts(model, layer)) {
    rules.push_back({ours + "mlp.linear_fc1.weight",
                     {mlp + "gate_proj.weight", mlp + "up_proj.weight"},
                     Form::stacked});
    rules.push_back({ours + "mlp.linear_fc2.weight", {mlp + "down_proj.weight"}});
  } else if (hugging_face_family(model) == HuggingFaceFamily::mixtral) {
    add_experts(rules, model, ours + "mlp.", theirs + "block_sparse_moe.", kNumbers);
  } else {
    add_experts(rules, model, ours + "mlp.", mlp, kProjections);
  }
}

std::vector<Rule> rules_of(const TransformerConfig& model) {
  const bool gpt2 = hugging_face_family(model) == HuggingFaceFamily::gpt2;
  const std::string root = gpt2 ? "transformer." : "model.";
  std::vector<Rule> rules = {
      {"embedding.word_embeddings.weight", {root + (gpt2 ? "wte" : "embed_tokens") + ".weight"}},
      {"decoder.final_layernorm.weight", {root + (gpt2 ? "ln_f" : "norm") + ".weight"}}};
  if (gpt2) {
    rules.push_back({"embedding.position_embeddings.weight", {root + "wpe.weight"}});
    rules.push_back({"decoder.final_layernorm.bias", {root + "ln_f.bias"}});
  }
  if (model.untie_embeddings_and_output_weights)
    rules.push_back({"output_layer.weight", {"lm_head.weight"}});
  for (int64_t i = 0; i < model.num_layers; ++i) {
    const std::string ours = fmt::format("decoder.layers.{}.", i);
    if (gpt2)
      add_gpt2_layer(rules, ours, fmt::format("{}h.{}.", root, i));
    else
      add_rotary_layer(rules, model, i, ours, fmt::format("{}layers.{}.", root, i));
  }
  return rules;
}

/// Sizes of the query-key-value layer.
struct Heads {
  explicit Heads(const TransformerConfig& model)
      : groups(*model.num_query_groups),
        per_group(model.num_attention_heads / groups),
        channels(*model.kv_channels) {}
  int64_t groups, per_group, channels;

  /// Rows group by group -> queries, keys, values [rows, columns].
  std::vector<at::Tensor> split(const at::Tensor& rows, int64_t columns) const {
    const auto parts = rows.reshape({groups, per_group + 2, channels, columns})
                           .split_with_sizes({per_group, 1, 1}, 1);
    std::vector<at::Tensor> split;
    for (const at::Tensor& part : parts) split.push_back(part.reshape({-1, columns}));
    return split;
  }
  at::Tensor join(const std::vector<at::Tensor>& parts, int64_t columns) const {
    return at::cat({parts[0].reshape({groups, per_group, channels, columns}),
                    parts[1].reshape({groups, 1, channels, columns}),
                    parts[2].reshape({groups, 1, channels, columns})},
                   1)
        .reshape({-1, columns});
  }
  std::vector<int64_t> rows() const {
    return {groups * per_group * channels, groups * channels, groups * channels};
  }
};

std::vector<at::Tensor> convert(const Rule& rule, const at::Tensor& weight, const Heads& heads) {
  switch (rule.form) {
    case Form::same:
      return {weight};
    case Form::transposed:
      return {weight.t()};
    case Form::fused_qkv: {
      const int64_t columns = weight.dim() == 1 ? 1 : weight.size(-1);
      const at::Tensor joined = at::cat(heads.split(weight, columns), 0);
      return {weight.dim() == 1 ? joined.flatten() : joined.t()};
    }
    case Form::separate_qkv: {
      if (weight.dim() > 1) return heads.split(weight, weight.size(-1));
      std::vector<at::Tensor> parts = heads.split(weight, 1);
      for (at::Tensor& part : parts) part = part.flatten();
      return parts;
    }
    case Form::stacked:
      return weight.reshape({static_cast<int64_t>(rule.theirs.size()), -1, weight.size(-1)})
          .unbind(0);
  }
  fail<UsageError>("unknown form of a weight");
}

at::Tensor convert_back(const Rule& rule, const std::vector<at::Tensor>& parts,
                        const Heads& heads) {
  const at::Tensor& first = parts.front();
  switch (rule.form) {
    case Form::same:
      return first;
    case Form::transposed:
      return first.t();
    case Form::fused_qkv: {
      const at::Tensor rows = first.dim() == 1 ? first.unsqueeze(1) : first.t();
      const at::Tensor joined = heads.join(rows.split_with_sizes(heads.rows(), 0), rows.size(1));
      return first.dim() == 1 ? joined.flatten() : joined;
    }
    case Form::separate_qkv: {
      std::vector<int64_t> shape = first.sizes().vec();
      for (size_t i = 0; i < parts.size(); ++i) {
        shape.at(0) = heads.rows()[i];
        TORCH_CHECK(parts[i].sizes() == at::IntArrayRef(shape));
      }
      const at::Tensor joined = heads.join(parts, first.dim() == 1 ? 1 : first.size(1));
      return first.dim() == 1 ? joined.flatten() : joined;
    }
    case Form::stacked:
      for (const at::Tensor& part : parts) TORCH_CHECK(part.sizes() == first.sizes());
      return at::cat(parts, 0);
  }
  fail<UsageError>("unknown form of a weight");
}

bool holds_no_weight(const std::string& name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
         name.ends_with(".rotary_emb.inv_freq");
}

/// What of a source has not been read yet.
class Remaining {
 public:
  Remaining(const TensorSource& source, const std::string& path) : source_(source), path_(path) {
    for (std::string& name : source.names()) names_.insert(std::move(name));
  }

  at::Tensor take(const std::string& name) {
    auto found = names_.find(name);
    const std::string prefix = "transformer.";
    if (found == names_.end() && name.starts_with(prefix))
      found = names_.find(name.substr(prefix.size()));
    require<FileError>(found != names_.end(), "'{}': tensor '{}' is missing", path_, name);
    at::Tensor tensor = source_.read(*found);
    require<FileError>(tensor.is_floating_point(),
                       "'{}': tensor '{}': found dtype {}, allowed: floating point", path_, name,
                       safetensors_dtype(tensor.scalar_type()));
    embeddings_ = embeddings_.empty() ? *found : embeddings_;
    names_.erase(found);
    return tensor;
  }

  /// Takes the copy of the embeddings, which were taken first, that some files of tied models hold.
  void drop_tied_output() {
    const std::string output = "lm_head.weight";
    if (names_.erase(output) == 0) return;
    const at::Tensor found = source_.read(output);
    if (found.is_meta()) return;
    const at::Tensor embeddings = source_.read(embeddings_);
    require<FileError>(at::equal(found.to(embeddings.scalar_type()), embeddings),
                       "'{}': tensor 'lm_head.weight' is not that of the embeddings, which the "
                       "config.json says it is tied to (tie_word_embeddings)",
                       path_);
  }

  void check_none_left() const {
    for (const std::string& name : names_)
      require<FileError>(holds_no_weight(name),
                         "'{}': tensor '{}' belongs to no weight of the model", path_, name);
  }

 private:
  const TensorSource& source_;
  const std::string& path_;
  std::set<std::string> names_;
  std::string embeddings_;
};

at::Tensor join_parts(const Rule& rule, Remaining& tensors, const Heads& heads,
                      const std::string& path) {
  std::vector<at::Tensor> parts;
  for (const std::string& name : rule.theirs) parts.push_back(tensors.take(name));
  try {
    return convert_back(rule, parts, heads);
  } catch (const c10::Error&) {
    fail<FileError>("'{}': tensor '{}': shape [{}] does not fit the config.json", path,
                    rule.theirs.front(), fmt::join(parts.front().sizes(), ", "));
  }
}

/// Tensors that are in memory.
class HeldTensors : public TensorSource {
 public:
  explicit HeldTensors(const NamedTensors& tensors) : tensors_(tensors) {}

  std::vector<std::string> names() const override {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : tensors_) names.push_back(name);
    return names;
  }
  at::Tensor read(const std::string& name) const override {
    const auto found = tensors_.find(name);
    require<UsageError>(found != tensors_.end(), "export: weight '{}' is missing", name);
    return found->second;
  }

 private:
  const NamedTensors& tensors_;
};

TensorSink into(NamedTensors& tensors) {
  return [&tensors](const std::string& name, const at::Tensor& tensor) { tensors[name] = tensor; };
}

}  // namespace

void to_hugging_face(const TransformerConfig& model, const TensorSource& weights,
                     const TensorSink& write) {
  const Heads heads(model);
  for (const Rule& rule : rules_of(model)) {
    std::vector<at::Tensor> parts = convert(rule, weights.read(rule.ours), heads);
    for (size_t i = 0; i < parts.size(); ++i)
      write(rule.theirs[i], std::exchange(parts[i], {}).contiguous());
  }
}

NamedTensors to_hugging_face(const TransformerConfig& model, const NamedTensors& weights) {
  NamedTensors result;
  to_hugging_face(model, HeldTensors(weights), into(result));
  return result;
}

std::vector<std::pair<std::string, at::Tensor>> linears_in_hugging_face(
    const TransformerConfig& model, const std::string& name, const at::Tensor& rows) {
  const std::vector<Rule> rules = rules_of(model);
  const auto rule = std::find_if(rules.begin(), rules.end(),
                                 [&](const Rule& candidate) { return candidate.ours == name; });
  require<UsageError>(rule != rules.end(), "export: weight '{}' is not one of transformers", name);
  const bool turned = rule->form == Form::transposed || rule->form == Form::fused_qkv;
  const std::vector<at::Tensor> parts = convert(*rule, rows.flatten(0, -2), Heads(model));
  std::vector<std::pair<std::string, at::Tensor>> linears;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string& theirs = rule->theirs[i];
    linears.emplace_back(theirs.substr(0, theirs.rfind('.')),
                         (turned ? parts[i].t() : parts[i]).contiguous());
  }
  return linears;
}

void from_hugging_face(const TransformerConfig& model, const TensorSource& tensors,
                       const std::string& path, const TensorSink& write) {
  const auto count = static_cast<int64_t>(tensors.names().size());
  require<FileError>(model.num_layers <= count,
                     "'{}': {} tensors, too few for the {} layers of the config.json", path, count,
                     model.num_layers);
  require<FileError>(model.num_experts.value_or(0) <= count,
                     "'{}': {} tensors, too few for the {} experts of the config.json", path, count,
                     model.num_experts.value_or(0));
  const Heads heads(model);
  Remaining remaining(tensors, path);
  for (const Rule& rule : rules_of(model))
    write(rule.ours, join_parts(rule, remaining, heads, path).contiguous());
  if (!model.untie_embeddings_and_output_weights) remaining.drop_tied_output();
  remaining.check_none_left();
}

NamedTensors from_hugging_face(const TransformerConfig& model, const NamedTensors& tensors,
                               const std::string& path) {
  NamedTensors result;
  from_hugging_face(model, HeldTensors(tensors), path, into(result));
  return result;
}

}  // namespace lockstep
