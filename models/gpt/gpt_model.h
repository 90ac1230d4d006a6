#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "lockstep/core/config.h"
#include "lockstep/core/parameters.h"
#include "lockstep/models/layers/embedding.h"
#include "lockstep/models/layers/linear.h"
#include "lockstep/models/layers/normalization.h"
#include "lockstep/models/layers/transformer_layer.h"

namespace lockstep {

struct GPTModelOptions {
  at::ScalarType dtype = at::kFloat;  ///< of the parameters: Float, Double or BFloat16
  c10::Device device = c10::kCPU;
  uint64_t seed = 1234;  ///< of the initial weights
};

/// The layers of a GPTModel, children `layers.0`, `layers.1`, ..., and `final_layernorm`.
class TransformerBlock : public DescribedModule {
 public:
  explicit TransformerBlock(const LayerContext& context);

  /// `hidden` [sequence, batch, hidden_size] -> the same shape
  at::Tensor forward(at::Tensor hidden) const;

 private:
  std::vector<std::shared_ptr<TransformerLayer>> layers_;
  int64_t recomputed_;  ///< layers, from the first
  std::shared_ptr<Norm> final_layernorm_;
};

/// The reference decoder-only language model. Children: `embedding`, `decoder`, and `output_layer`
/// where its weight is not tied to the word embedding. Parameter names are those of Megatron Core's
/// GPTModel ("decoder.layers.0.self_attention.linear_qkv.weight").
///
/// Initial weights depend on (seed, parameter's name, element's index) alone: normal values of
/// standard deviation init_method_std, for linear_proj and linear_fc2 init_method_std /
/// sqrt(2 num_layers); norms 1; biases 0.
class GPTModel : public DescribedModule {
 public:
  /// `config` need not be resolved. ConfigError names a field that cannot be used.
  explicit GPTModel(const TransformerConfig& config, const GPTModelOptions& options = {});

  /// `tokens` [batch, sequence] of int64, sequence <= seq_length. Without `labels` the logits
  /// [batch, sequence, vocabulary]; with `labels` [batch, sequence] the loss of each token [batch,
  /// sequence] in nats, in fp32 (fp64 for a model in fp64). UsageError on other shapes.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& labels = {}) const;

  /// The configuration, resolved.
  const TransformerConfig& config() const { return config_; }

 private:
  TransformerConfig config_;
  std::shared_ptr<LanguageModelEmbedding> embedding_;
  std::shared_ptr<TransformerBlock> decoder_;
  std::shared_ptr<Linear> output_layer_;  ///< null if tied
};

/// `config` checked and completed, without the rest of a Config. ConfigError names the field.
TransformerConfig resolve_model(const TransformerConfig& config);

}  // namespace lockstep
