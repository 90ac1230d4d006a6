#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/core/param_spec.h"

/// The parameters of the layers as data: names, shapes over all ranks, initial values,
/// descriptions. Each layer registers what its function here declares, and the planner counts the
/// same; a new layer declares its parameters here and nowhere else. Nothing here needs libtorch.
namespace lockstep {

/// What determines the parameters of a layer.
struct LayerSettings {
  const TransformerConfig& config;  ///< resolved
  int64_t tensor_ranks = 1;         ///< of tp
  bool sequence_parallel = false;
  int64_t layer = 0;     ///< number of the transformer layer, from 0 over the whole model
  LoraConfig lora = {};  ///< resolved; without a rank there are no adapters

  /// State over tp of the gradient of a parameter that is the same on all its ranks and works on
  /// [sequence, batch, hidden] between the tensor-parallel regions: with sequence parallelism each
  /// rank sees a part of the tokens.
  GradientState replicated_gradient_state() const {
    return sequence_parallel ? GradientState::partial_sum : GradientState::complete;
  }
};

/// How VocabParallelEmbedding's table is used.
enum class TableUse {
  one_way,      ///< for the embedding or for the output
  both_ways,    ///< for both, by this one table
  other_stage,  ///< for one of them, and a copy of it on the other end of the pipeline for the
                ///< other
};

/// The features of an expert's weight along which etp cuts.
enum class ExpertCut { out, in };

/// Standard deviation of the layers that write into the residual stream: init_method_std /
/// sqrt(2 num_layers), as in Megatron Core's scaled_init_method_normal.
double output_layer_init_std(const TransformerConfig& config);

/// See ColumnParallelLinear. UsageError: `out` is empty.
ModuleSpec column_parallel_linear_params(int64_t in_features, std::vector<int64_t> out, bool bias,
                                         double init_std,
                                         std::vector<int64_t> rows_of_matrices = {});
/// See RowParallelLinear. `replicated`: see LayerSettings::replicated_gradient_state().
ModuleSpec row_parallel_linear_params(GradientState replicated, int64_t in_features,
                                      int64_t out_features, bool bias, double init_std);
/// See ReplicatedLinear. `replicated` as above.
ModuleSpec replicated_linear_params(GradientState replicated, int64_t in_features,
                                    int64_t out_features, double init_std);
/// See Norm. `replicated` as above.
ModuleSpec norm_params(int64_t width, Normalization kind, GradientState replicated);
ModuleSpec norm_params(const LayerSettings& settings);
/// See VocabParallelEmbedding. `rows` counts `vocab_size` and the padding, over all ranks.
ModuleSpec vocab_parallel_embedding_params(int64_t vocab_size, int64_t rows, int64_t width,
                                           double init_std, TableUse use);
ModuleSpec vocab_parallel_embedding_params(const LayerSettings& settings, TableUse use);
/// See PositionEmbedding.
ModuleSpec position_embedding_params(const LayerSettings& settings);
/// See LanguageModelEmbedding.
ModuleSpec language_model_embedding_params(const LayerSettings& settings, TableUse use);
/// See SelfAttention. UsageError: rows that do not fit into 64 bits.
ModuleSpec self_attention_params(const LayerSettings& settings);
/// See LatentAttention. UsageError: rows that do not fit into 64 bits.
ModuleSpec latent_attention_params(const LayerSettings& settings);
/// See Attention: the one of the two that the model has.
ModuleSpec attention_params(const LayerSettings& settings);
/// See MLP.
ModuleSpec mlp_params(const LayerSettings& settings, int64_t width);
/// See TopKRouter.
ModuleSpec router_params(const LayerSettings& settings);
/// See ExpertLinear.
ModuleSpec expert_linear_params(const LayerSettings& settings, std::vector<int64_t> out, int64_t in,
                                ExpertCut cut, double init_std);
/// See GroupedMLP.
ModuleSpec grouped_mlp_params(const LayerSettings& settings);
/// See MoELayer.
ModuleSpec moe_layer_params(const LayerSettings& settings);
/// See make_feed_forward().
ModuleSpec feed_forward_params(const LayerSettings& settings);
/// See TransformerLayer.
ModuleSpec transformer_layer_params(const LayerSettings& settings);

}  // namespace lockstep
