#include "lockstep/checkpoint/hugging_face_weights.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/hugging_face_names.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/core/check.h"

namespace lockstep {
namespace {

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

using Rule = WeightRule;
using Form = WeightForm;

/// Reorders the last `rule.rotated` rows of each block of [rows, columns]: puts the pairs (i, i +
/// half) side by side or, with `back`, moves pairs that are side by side to (i, i + half).
at::Tensor with_pairs(const Rule& rule, const at::Tensor& weight, bool back) {
  const at::Tensor blocks = weight.reshape({rule.blocks, -1, weight.size(-1)});
  const int64_t kept = blocks.size(1) - rule.rotated, half = rule.rotated / 2;
  const std::vector<int64_t> pairs =
      back ? std::vector<int64_t>{half, 2} : std::vector<int64_t>{2, half};
  const at::Tensor turned =
      blocks.narrow(1, kept, rule.rotated).unflatten(1, pairs).transpose(1, 2).flatten(1, 2);
  return at::cat({blocks.narrow(1, 0, kept), turned}, 1).flatten(0, 1);
}

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
    case Form::rows:
      return weight.reshape({static_cast<int64_t>(rule.theirs.size()), -1}).unbind(0);
    case Form::pairs:
      return {with_pairs(rule, weight, /*back=*/false)};
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
      TORCH_CHECK(first.dim() > 0);
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
    case Form::rows:
      for (const at::Tensor& part : parts) TORCH_CHECK(part.dim() == 1);
      return at::stack(parts);
    case Form::pairs:
      return with_pairs(rule, first, /*back=*/true);
  }
  fail<UsageError>("unknown form of a weight");
}

/// A DeepSeek model has one more layer after the last one, which predicts the token after the next.
bool holds_no_weight(const std::string& name, const TransformerConfig& model) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias") ||
         name.ends_with(".rotary_emb.inv_freq") ||
         (model.multi_latent_attention &&
          name.starts_with(fmt::format("model.layers.{}.", model.num_layers)));
}

/// The tensors of a source that have not been read yet.
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

  /// Takes the copy of the embeddings that some files of tied models hold. The embeddings
  /// themselves were taken first.
  void drop_tied_output() {
    const std::string output = "lm_head.weight";
    if (names_.erase(output) == 0) return;
    const at::Tensor found = source_.read(output);
    if (found.is_meta()) return;
    const at::Tensor embeddings = source_.read(embeddings_);
    require<FileError>(at::equal(found.to(embeddings.scalar_type()), embeddings),
                       "'{}': tensor 'lm_head.weight' differs from the embedding, although "
                       "config.json ties them (tie_word_embeddings)",
                       path_);
  }

  void check_none_left(const TransformerConfig& model) const {
    for (const std::string& name : names_)
      require<FileError>(holds_no_weight(name, model),
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
  for (const Rule& rule : weight_rules(model)) {
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
  const std::vector<Rule> rules = weight_rules(model);
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
  for (const Rule& rule : weight_rules(model))
    write(rule.ours, join_parts(rule, remaining, heads, path).contiguous());
  if (!model.untie_embeddings_and_output_weights) remaining.drop_tied_output();
  remaining.check_none_left(model);
}

NamedTensors from_hugging_face(const TransformerConfig& model, const NamedTensors& tensors,
                               const std::string& path) {
  NamedTensors result;
  from_hugging_face(model, HeldTensors(tensors), path, into(result));
  return result;
}

}  // namespace lockstep
