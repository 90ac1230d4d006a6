#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/core/placement.h"
#include "lockstep/models/gpt_params.h"

/// The part of a GPTModel that one rank of a pipeline stage holds, according to the configuration
/// and to what its layers declare about their parameters (gpt_params()).
namespace lockstep {

/// Widths on one rank of tp.
struct LocalWidths {
  int64_t heads;       ///< of queries
  int64_t groups;      ///< key and value heads that attention sees; at least one, also where tp is
                       ///< larger (then the rows of linear_qkv are cut further: see HeadLayout)
  int64_t ffn;         ///< inner width of the feed-forward network
  int64_t vocabulary;  ///< rows of the embedding table, padding included
};

/// Layers that a rank runs in one piece: a whole stage, or one of its chunks.
struct ModelChunk {
  int64_t first_layer = 0;  ///< in the whole model
  int64_t num_layers = 0;
  bool has_embedding = false;  ///< the first piece of the pipeline
  bool has_output = false;     ///< the last one: final norm and output layer

  /// The part of a GPTModel that this chunk is.
  GPTStage stage() const { return {first_layer, num_layers, has_embedding, has_output}; }
};

struct ShapedParameter {
  std::string name;            ///< as in GPTModel
  std::vector<int64_t> shape;  ///< on this rank
  ParamDescription description;
  bool trained = true;  ///< otherwise frozen: no gradient, no optimizer state
  int64_t unit = 0;     ///< see number_units()

  /// UsageError if it does not fit into 64 bits.
  int64_t numel() const;
};

/// `config` is resolved. ConfigError naming the fields that tensor_model_parallel_size must divide.
LocalWidths local_widths(const Config& config);

/// The chunks of pipeline stage `stage`; a single one without interleaving. ConfigError as
/// stage_layout().
std::vector<ModelChunk> chunks_of_stage(const Config& config, int64_t stage);

/// The parameters of `chunk`, in the order in which GPTModel registers them.
std::vector<ShapedParameter> chunk_parameters(const Config& config, const ModelChunk& chunk);

/// The parameters of the whole model on one rank, in the order in which GPTModel registers them:
/// embedding, layers, final norm, output layer.
std::vector<ShapedParameter> model_parameters(const Config& config);

/// Elements of all parameters of the model, whatever the layout; padding of the vocabulary for more
/// than one rank is left out.
int64_t num_parameters(const Config& config);

/// The elements that are trained: with lora.rank those of the adapters.
int64_t num_trained_parameters(const Config& config);

/// The elements of experts, without those that all tokens share.
int64_t num_expert_parameters(const Config& config);

/// The elements that a token uses: of the experts', moe_router_topk of num_experts.
int64_t num_active_parameters(const Config& config);

}  // namespace lockstep
