#include "lockstep/models/gpt/gpt_model.h"

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/models/layers/cross_entropy.h"
#include "lockstep/models/layers/recompute.h"

namespace lockstep {

TransformerConfig resolve_model(const TransformerConfig& config) {
  Config whole;
  whole.model = config;
  whole = resolve(whole);
  validate(whole);
  return whole.model;
}

TransformerBlock::TransformerBlock(const LayerContext& context)
    : recomputed_(context.config.recompute_num_layers.value_or(0)) {
  auto list = register_module("layers", std::make_shared<torch::nn::Module>());
  const LayerContext list_context = context.child("layers");
  for (int64_t i = 0; i < context.config.num_layers; ++i) {
    const std::string name = std::to_string(i);
    layers_.push_back(
        list->register_module(name, std::make_shared<TransformerLayer>(list_context.child(name))));
  }
  final_layernorm_ =
      register_module("final_layernorm", std::make_shared<Norm>(context.child("final_layernorm")));
}

at::Tensor TransformerBlock::forward(at::Tensor hidden) const {
  for (size_t i = 0; i < layers_.size(); ++i) {
    const auto layer = [module = layers_[i]](const std::vector<at::Tensor>& inputs) {
      return module->forward(inputs[0]);
    };
    hidden = static_cast<int64_t>(i) < recomputed_ ? recompute(layer, {hidden}) : layer({hidden});
  }
  return final_layernorm_->forward(hidden);
}

GPTModel::GPTModel(const TransformerConfig& config, const GPTModelOptions& options)
    : config_(resolve_model(config)) {
  const LayerContext context{config_, at::TensorOptions(options.device).dtype(options.dtype),
                             options.seed};
  embedding_ = register_module(
      "embedding", std::make_shared<LanguageModelEmbedding>(context.child("embedding")));
  decoder_ =
      register_module("decoder", std::make_shared<TransformerBlock>(context.child("decoder")));
  if (config_.untie_embeddings_and_output_weights)
    output_layer_ = register_module(
        "output_layer",
        std::make_shared<Linear>(context.child("output_layer"), config_.hidden_size,
                                 config_.vocab_size, /*bias=*/false, config_.init_method_std));
}

at::Tensor GPTModel::forward(const at::Tensor& tokens, const at::Tensor& labels) const {
  require<UsageError>(tokens.dim() == 2 && tokens.size(1) <= config_.seq_length &&
                          tokens.scalar_type() == at::kLong,
                      "GPTModel: tokens: found {} of {}, allowed: [batch, sequence] of Long with "
                      "sequence <= model.seq_length ({})",
                      fmt::join(tokens.sizes(), " x "), at::toString(tokens.scalar_type()),
                      config_.seq_length);
  require<UsageError>(!labels.defined() || labels.sizes() == tokens.sizes(),
                      "GPTModel: labels: the shape must be that of tokens ({})",
                      fmt::join(tokens.sizes(), " x "));
  const at::Tensor hidden = decoder_->forward(embedding_->forward(tokens));
  const at::Tensor logits = output_layer_
                                ? output_layer_->forward(hidden)
                                : at::linear(hidden, embedding_->word_embeddings_weight());
  if (!labels.defined()) return logits.transpose(0, 1).contiguous();
  const at::Tensor losses =
      token_cross_entropy(logits.flatten(0, 1), labels.t().contiguous().flatten());
  return losses.view({tokens.size(1), tokens.size(0)}).t();
}

}  // namespace lockstep
