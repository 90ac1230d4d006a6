#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "lockstep/core/config.h"
#include "lockstep/core/deferred_gradients.h"
#include "lockstep/core/parameters.h"
#include "lockstep/models/activation_offload.h"
#include "lockstep/models/embedding.h"
#include "lockstep/models/fp8_scaling.h"
#include "lockstep/models/gpt_params.h"
#include "lockstep/models/normalization.h"
#include "lockstep/models/token_positions.h"
#include "lockstep/models/transformer_layer.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

struct GPTModelOptions {
  at::ScalarType dtype = at::kFloat;  ///< of the parameters: Float, Double, BFloat16 or Half
  c10::Device device = c10::kCPU;
  uint64_t seed = 1234;  ///< of the initial weights and of dropout
  /// Where backward stores deferred weight gradients of linear layers; may be null.
  std::shared_ptr<DeferredGradients> deferred = {};
  /// The scale of the losses that routers of experts add in backward: see TokenLossScale. Null: 1,
  /// which is right only if the training loop calls backward on sums of losses, without a loss
  /// scale.
  std::shared_ptr<const TokenLossScale> loss_scale = {};
  /// With a rank: low-rank adapters are trained, and all other parameters are frozen.
  LoraConfig lora = {};
  /// In the transformer layers that it covers, the linear layers of attention and MLP multiply in
  /// 8-bit floats. The training loop must call Fp8Scaling::end_step() after each step.
  Fp8Options fp8 = {};
  /// False: the weights are loaded, and random initial values would be overwritten. Those of
  /// adapters are always set.
  bool perform_initialization = true;
};

/// The input of a stage. It is the same on all tp ranks, except `hidden` with sequence parallelism.
/// Each rank of cp gets its part of the sequences (see cut_for_context).
struct GPTInput {
  at::Tensor tokens = {};  ///< [batch, sequence] of int64; set if the stage has the embedding
  at::Tensor labels = {};  ///< [batch, sequence] of int64; optional, if the stage has the loss
  at::Tensor hidden = {};  ///< output of the previous stage; set if this one has no embedding
  TokenPositions positions = {};  ///< default: from 0 on; over cp those of this rank's part
  /// Compute logits of the last token alone. Not with labels, nor with sequences that sequence
  /// parallelism or cp cuts: one rank has their last token.
  bool last_only = false;
};

/// The layers of a GPTModel, children `layers.N` with N counted over the whole model, and
/// `final_layernorm` if the stage has the loss.
class TransformerBlock : public DescribedModule {
 public:
  TransformerBlock(const LayerContext& context, const GPTStage& stage);
  /// `spec` as transformer_block_params() returns it.
  TransformerBlock(const LayerContext& context, const ModuleSpec& spec, const GPTStage& stage);

  /// `hidden` [sequence, batch, hidden_size], with sequence parallelism this rank's [sequence /
  /// ranks, ...] -> the same shape
  at::Tensor forward(at::Tensor hidden, const TokenPositions& tokens) const;

 private:
  /// The layers of the stage from `first` on; only `hidden` is kept for backward.
  at::Tensor run_piece(int64_t first, int64_t num_layers, const at::Tensor& hidden,
                       const TokenPositions& tokens) const;

  std::vector<std::shared_ptr<TransformerLayer>> layers_;
  int64_t first_layer_;
  std::vector<int64_t> recomputed_;             ///< see recomputed_pieces()
  std::optional<ProcessGroup> saving_;          ///< ranks that share what recomputed layers keep
  std::unique_ptr<ActivationOffload> offload_;  ///< of that; null: it stays on the device
  std::string name_;
  std::shared_ptr<Norm> final_layernorm_;
};

/// The reference decoder-only language model, or a stage of it, cut over the ranks of tp. Children:
/// `embedding`, `decoder`, and `output_layer` if its weight is not tied to the word embedding.
/// Parameter names are those of Megatron Core's GPTModel
/// ("decoder.layers.0.self_attention.linear_qkv.weight") and are the same on every layout: a stage
/// has those of its layers. If the output layer is tied and is on a different stage from the
/// embedding, both stages have a parameter "embedding.word_embeddings.weight" with a Tie
/// ("word_embeddings").
///
/// Initial weights depend only on (seed, parameter's name, element's index): normal values of
/// standard deviation init_method_std, for linear_proj and linear_fc2 init_method_std / sqrt(2
/// num_layers); norms 1; biases 0. Dropout is active in training mode (train(), eval()), and draws
/// the same numbers on every layout. The adapters of GPTModelOptions::lora start as
/// adapter_params() says, so at first they change nothing.
///
/// With experts, a training loop must call the functions of models/router_step.h in each step:
/// otherwise expert biases stay 0, and global_aux_loss balances the mean of all steps.
class GPTModel : public DescribedModule {
 public:
  /// The whole model in one process. `config` need not be resolved. ConfigError names a field that
  /// cannot be used.
  explicit GPTModel(const TransformerConfig& config, const GPTModelOptions& options = {});

  /// The stage `stage` of the model, cut over tp and, for experts, over ep and expert-tp; sequences
  /// are cut over cp. Connects these groups, so all their ranks must make the same call. `parallel`
  /// must have the sizes of `state` (otherwise UsageError) and may set sequence_parallel.
  /// ConfigError is thrown before anything is connected.
  GPTModel(const TransformerConfig& config, const ParallelConfig& parallel,
           const ParallelState& state, const GPTStage& stage, const GPTModelOptions& options = {});

  /// Runs the stage.
  /// - With the loss and `labels`: the loss of each token [batch, sequence] in nats, in fp32 (fp64
  ///   for a model in fp64), the same on all ranks of tp. Labels may be kIgnoredLabel.
  ///   label_smoothing applies in training mode (train(), eval()).
  /// - With the loss and no labels: the logits [batch, sequence, vocabulary], or with last_only
  ///   [batch, 1, vocabulary], gathered over tp. With positions.cache the tokens follow those in
  ///   the cache and are all added to it: see KeyValueCache.
  /// - Without the loss: activations [sequence, batch, hidden_size], with sequence parallelism this
  ///   rank's [sequence / ranks, batch, hidden_size], which are the next stage's `hidden`.
  ///
  /// UsageError, before anything is sent: an input that is missing or has another shape, a sequence
  /// longer than seq_length or, with sequence parallelism, not divisible by the ranks of tp, tokens
  /// or labels outside the vocabulary (looked for on the CPU only), last_only where it is not
  /// possible.
  at::Tensor forward(const GPTInput& input) const;

  /// The same for a whole model and the positions 0, 1, ...
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& labels = {}) const;

  /// The configuration, resolved.
  const TransformerConfig& config() const { return config_; }
  const GPTStage& stage() const { return stage_; }
  /// Null without GPTModelOptions::fp8.
  const std::shared_ptr<Fp8Scaling>& fp8() const { return fp8_; }

 private:
  void build(const LayerContext& context);
  void add_output(const LayerContext& context, const ModuleSpec& spec, TableUse use);
  void freeze_all_but(const ModuleSpec& trained);
  void check(const GPTInput& input) const;
  void check_ids(const at::Tensor& ids, const char* what) const;
  TokenPositions positions_of(const GPTInput& input) const;
  at::Tensor output(const at::Tensor& hidden, const at::Tensor& labels) const;

  TransformerConfig config_;
  GPTStage stage_;
  ProcessGroup tensor_parallel_;
  ProcessGroup context_parallel_;
  bool sequence_parallel_;
  std::shared_ptr<Fp8Scaling> fp8_;
  std::shared_ptr<LanguageModelEmbedding> embedding_;  ///< null on later stages
  std::shared_ptr<TransformerBlock> decoder_;
  std::shared_ptr<VocabParallelEmbedding> output_table_;  ///< null on earlier stages
};

/// `config` checked and completed, without the rest of a Config. ConfigError names the field.
TransformerConfig resolve_model(const TransformerConfig& config,
                                const ParallelConfig& parallel = {});

}  // namespace lockstep
