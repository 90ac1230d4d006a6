#include "lockstep/models/gpt_model.h"

#include <set>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/lora_rules.h"
#include "lockstep/core/planned_cpu.h"
#include "lockstep/core/recompute_rules.h"
#include "lockstep/core/upload.h"
#include "lockstep/models/context_parallel.h"
#include "lockstep/models/cross_entropy.h"
#include "lockstep/models/input_check.h"
#include "lockstep/models/key_value_cache.h"
#include "lockstep/models/offloaded_layer.h"
#include "lockstep/models/recompute.h"
#include "lockstep/models/rotary_embedding.h"
#include "lockstep/parallel_state/parallel_functions.h"

namespace lockstep {
namespace {

/// Checks the configuration and the sizes of `state`, and returns the resolved configuration.
TransformerConfig checked_config(const TransformerConfig& config, const ParallelConfig& parallel,
                                 const ParallelState& state, const GPTStage& stage) {
  TransformerConfig resolved = resolve_model(config, parallel);
  const ParallelSizes& sizes = state.grids().sizes();
  const auto check_size = [](const char* field, int64_t found, int64_t allowed) {
    require<UsageError>(found == allowed,
                        "GPTModel: parallel.{}: found {}, allowed: {}, as in the ParallelState",
                        field, found, allowed);
  };
  check_size("tensor_model_parallel_size", parallel.tensor_model_parallel_size, sizes.tensor);
  check_size("context_parallel_size", parallel.context_parallel_size, sizes.context);
  check_size("expert_model_parallel_size", parallel.expert_model_parallel_size, sizes.expert);
  require<UsageError>(stage.first_layer >= 0 && stage.num_layers >= 0 &&
                          stage.first_layer + stage.num_layers <= resolved.num_layers,
                      "GPTModel: stage: found {} layers from {} on, allowed: layers of the {} of "
                      "the model",
                      stage.num_layers, stage.first_layer, resolved.num_layers);
  return resolved;
}

LoraConfig resolved_lora(const TransformerConfig& model, const LoraConfig& lora) {
  Config whole;
  whole.model = model;
  whole.lora = lora;
  whole = resolve(whole);
  check_lora(whole);
  return whole.lora;
}

/// The most tokens of a sequence that a rank of cp may have, and a text about it for messages.
struct LongestSequence {
  int64_t tokens;
  std::string text;
  LongestSequence(const TransformerConfig& config, int64_t ranks)
      : tokens(config.seq_length / ranks),
        text(ranks == 1 ? fmt::format("model.seq_length ({})", config.seq_length)
                        : fmt::format("{} (model.seq_length {} / {} ranks of cp)", tokens,
                                      config.seq_length, ranks)) {}
};

/// `hidden` [sequence / parts, batch, hidden_size]; `labels`, if any, must be of the same tokens.
void check_hidden(const at::Tensor& hidden, const at::Tensor& labels,
                  const TransformerConfig& config, int64_t parts, const LongestSequence& longest) {
  require<UsageError>(hidden.defined() && hidden.dim() == 3 && hidden.size(2) == config.hidden_size,
                      "GPTModel: hidden: found {}, allowed: [sequence, batch, {}]",
                      hidden.defined() ? fmt::format("{}", hidden.sizes()) : "nothing",
                      config.hidden_size);
  const int64_t sequence = hidden.size(0) * parts, batch = hidden.size(1);
  require<UsageError>(sequence <= longest.tokens,
                      "GPTModel: hidden: found a sequence of {}, allowed: <= {}", sequence,
                      longest.text);
  if (!labels.defined() || labels.dim() != 2) return;
  require<UsageError>(labels.size(0) == batch && labels.size(1) == sequence,
                      "GPTModel: labels: found {}, allowed: {} x {}, as of hidden",
                      fmt::join(labels.sizes(), " x "), batch, sequence);
}

/// Checks positions that a caller gives as `input` for `tokens` tokens of this rank of cp.
void check_positions(const at::Tensor& positions, const char* input, int64_t tokens,
                     const TransformerConfig& config) {
  if (!positions.defined()) return;
  require<UsageError>(
      positions.dim() == 1 && positions.size(0) == tokens && positions.scalar_type() == at::kLong,
      "GPTModel: {}: found {} of {}, allowed: {} of Long", input,
      fmt::join(positions.sizes(), " x "), at::toString(positions.scalar_type()), tokens);
  if (tokens == 0 || config.position_embedding_type == PositionEmbeddingType::none) return;
  if (!positions.is_cpu()) return;  // reading them would wait for the device
  const auto [least, most] = positions.aminmax();
  const int64_t low = least.item<int64_t>(), high = most.item<int64_t>();
  require<UsageError>(low >= 0 && high < config.seq_length,
                      "GPTModel: {}: found {}, allowed: 0 to {} (model.seq_length - 1)", input,
                      low < 0 ? low : high, config.seq_length - 1);
}

/// Checks positions in documents, padding and documents that a caller gives for `batch` sequences
/// of `sequence` tokens on each of `ranks` ranks of cp.
void check_documents(const TokenPositions& given, int64_t batch, int64_t sequence, int64_t ranks,
                     const TransformerConfig& config) {
  if (const at::Tensor& places = given.document_positions; places.defined()) {
    require<UsageError>(places.dim() == 2 && places.size(0) == sequence && places.size(1) == batch,
                        "GPTModel: document_positions: found {}, allowed: {} x {}",
                        fmt::join(places.sizes(), " x "), sequence, batch);
    check_positions(places.flatten(), "document_positions", places.numel(), config);
  }
  if (const at::Tensor& map = given.padding.map; map.defined())
    require<UsageError>(map.dim() == 2 && map.size(0) == sequence && map.size(1) == batch &&
                            map.scalar_type() == at::kBool,
                        "GPTModel: padding: found {} of {}, allowed: {} x {} of Bool",
                        fmt::join(map.sizes(), " x "), at::toString(map.scalar_type()), sequence,
                        batch);
  if (given.documents)
    check_sequence_documents(*given.documents, batch, sequence * ranks, "GPTModel: documents");
}

/// Checks that a cache of `config` has room for `sequence` more tokens.
void check_cache(const KeyValueCache* cache, const TokenPositions& given, int64_t sequence,
                 const TransformerConfig& config, bool cut) {
  if (cache == nullptr) return;
  require<UsageError>(!cut && !given.embedded().defined() && !given.documents,
                      "GPTModel: cache: found {}, allowed: whole sequences and no positions",
                      cut               ? "sequences that tp or cp cuts"
                      : given.documents ? "documents beside it"
                                        : "positions beside it");
  require<UsageError>(
      cache->length() + sequence <= config.seq_length,
      "GPTModel: cache: found {} tokens and {} more, allowed: {} (model.seq_length)",
      cache->length(), sequence, config.seq_length);
}

void check_last_only(const GPTInput& input, int64_t sequence, bool cut) {
  if (!input.last_only) return;
  require<UsageError>(!cut && sequence > 0 && !input.labels.defined(),
                      "GPTModel: last_only: found {}, allowed: whole sequences of at least one "
                      "token and no labels",
                      cut             ? "sequences that tp or cp cuts"
                      : sequence == 0 ? "no token"
                                      : "labels beside it");
}

/// The child `layers` of a TransformerBlock.
struct LayerList : DescribedModule {
  LayerList(const LayerContext& context, const ModuleSpec& spec, const GPTStage& stage) {
    LayerContext each = context;
    if (stage.num_layers > 0 &&
        context.config.position_embedding_type == PositionEmbeddingType::rope)
      each.rotary = rotary_of(context);
    for (int64_t i = stage.first_layer; i < stage.first_layer + stage.num_layers; ++i) {
      each.layer = i;
      const bool covered =
          context.fp8 && context.fp8->options().covers(i, context.config.num_layers);
      each.fp8 = covered ? context.fp8 : nullptr;
      layers.push_back(add_child<TransformerLayer>(each, spec, std::to_string(i)));
    }
  }
  std::vector<std::shared_ptr<TransformerLayer>> layers;
};

/// The child `embedding` of a last stage, which has a copy of the first one's table.
struct TiedTable : DescribedModule {
  TiedTable(const LayerContext& context, const ModuleSpec& spec, TableUse use)
      : table(add_child<VocabParallelEmbedding>(context, spec, "word_embeddings", use)) {}
  std::shared_ptr<VocabParallelEmbedding> table;
};

}  // namespace

TransformerConfig resolve_model(const TransformerConfig& config, const ParallelConfig& parallel) {
  Config whole;
  whole.model = config;
  whole.parallel = parallel;
  whole.parallel.num_distributed_optimizer_instances = 1;  // it concerns only the optimizer
  whole = resolve(whole);
  validate(whole);
  return whole.model;
}

TransformerBlock::TransformerBlock(const LayerContext& context, const ModuleSpec& spec,
                                   const GPTStage& stage)
    : first_layer_(stage.first_layer),
      recomputed_(recomputed_pieces(context.config, stage.num_layers)),
      name_(context.name) {
  if (context.config.distribute_saved_activations) saving_ = context.tensor_parallel();
  const c10::Device device = context.options.device();
  const bool has_host = device.is_meta() ? plans_gpu() : !device.is_cpu();
  if (context.config.offload_activations && has_host)
    offload_ = std::make_unique<ActivationOffload>(device);
  layers_ = add_child<LayerList>(context, spec, "layers", stage)->layers;
  if (stage.has_loss) final_layernorm_ = add_child<Norm>(context, spec, "final_layernorm");
}

TransformerBlock::TransformerBlock(const LayerContext& context, const GPTStage& stage)
    : TransformerBlock(context, transformer_block_params(context.settings(), stage), stage) {}

at::Tensor TransformerBlock::forward(at::Tensor hidden, const TokenPositions& tokens) const {
  int64_t next = 0;
  if (offload_) offload_->begin_pass();
  for (const int64_t num_layers : recomputed_) {
    hidden = run_piece(next, num_layers, hidden, tokens);
    next += num_layers;
  }
  for (size_t i = static_cast<size_t>(next); i < layers_.size(); ++i) {
    const auto run = [&](const at::Tensor& x) { return layers_[i]->forward(x, tokens); };
    if (offload_)
      hidden = run_offloaded(*offload_, std::exchange(hidden, {}), /*owns_input=*/i > 0, run);
    else
      hidden = run(hidden);
  }
  return final_layernorm_ ? final_layernorm_->forward(hidden) : hidden;
}

at::Tensor TransformerBlock::run_piece(int64_t first, int64_t num_layers, const at::Tensor& hidden,
                                       const TokenPositions& tokens) const {
  const auto begin = layers_.begin() + first;
  const auto run = [layers = std::vector(begin, begin + num_layers),
                    tokens](const std::vector<at::Tensor>& inputs) {
    at::Tensor output = inputs[0];
    for (const auto& layer : layers) output = layer->forward(output, tokens);
    return output;
  };
  if (!saving_) return recompute(run, {hidden}, offload_.get());
  return recompute_from_parts(run, {hidden}, *saving_,
                              name_ + "layers." + std::to_string(first_layer_ + first) + " input",
                              offload_.get());
}

GPTModel::GPTModel(const TransformerConfig& config, const GPTModelOptions& options)
    : GPTModel(config, ParallelConfig{}, ParallelState::single_process(options.device),
               GPTStage::whole(config), options) {}

GPTModel::GPTModel(const TransformerConfig& config, const ParallelConfig& parallel,
                   const ParallelState& state, const GPTStage& stage,
                   const GPTModelOptions& options)
    : config_(checked_config(config, parallel, state, stage)),
      stage_(stage),
      tensor_parallel_(state.group(GroupKind::tp)),
      context_parallel_(state.group(GroupKind::cp)),
      sequence_parallel_(parallel.sequence_parallel),
      fp8_(options.fp8.enabled() ? std::make_shared<Fp8Scaling>(options.fp8, options.device,
                                                                state.group(GroupKind::tp_cp))
                                 : nullptr) {
  build({.config = config_,
         .options = at::TensorOptions(options.device).dtype(options.dtype),
         .seed = options.seed,
         .parallel = parallel,
         .state = state,
         .deferred = options.deferred,
         .loss_scale = options.loss_scale,
         .lora = resolved_lora(config, options.lora),
         .fp8 = fp8_,
         .perform_initialization = options.perform_initialization});
}

void GPTModel::build(const LayerContext& context) {
  const ModuleSpec spec = gpt_params(context.settings(), stage_);
  const TableUse use = table_use(config_, stage_);
  if (stage_.has_embedding)
    embedding_ = add_child<LanguageModelEmbedding>(context, spec, "embedding", use);
  decoder_ = add_child<TransformerBlock>(context, spec, "decoder", stage_);
  add_output(context, spec, use);
  if (context.lora.rank) freeze_all_but(trained_params(context.settings(), stage_));
}

void GPTModel::add_output(const LayerContext& context, const ModuleSpec& spec, TableUse use) {
  if (!stage_.has_loss) return;
  if (use == TableUse::both_ways)
    output_table_ = embedding_->word_embeddings();
  else if (use == TableUse::other_stage)
    output_table_ = add_child<TiedTable>(context, spec, "embedding", use)->table;
  else
    output_table_ = add_child<VocabParallelEmbedding>(context, spec, "output_layer", use);
}

void GPTModel::freeze_all_but(const ModuleSpec& trained) {
  std::set<std::string> names;
  for (const ParamSpec& param : trained.all()) names.insert(param.name);
  for (auto& param : named_parameters())
    param.value().set_requires_grad(names.contains(param.key()));
}

void GPTModel::check_ids(const at::Tensor& ids, const char* what) const {
  const LongestSequence longest(config_, context_parallel_.size());
  const bool fits = ids.defined() && ids.dim() == 2 && ids.scalar_type() == at::kLong &&
                    ids.size(1) <= longest.tokens;
  require<UsageError>(
      fits, "GPTModel: {}: found {}, allowed: [batch, sequence] of Long with sequence <= {}", what,
      ids.defined()
          ? fmt::format("{} of {}", fmt::join(ids.sizes(), " x "), at::toString(ids.scalar_type()))
          : "nothing",
      longest.text);
  const int64_t parts = sequence_parallel_ ? tensor_parallel_.size() : 1;
  require<UsageError>(ids.size(1) % parts == 0,
                      "GPTModel: {}: found a sequence of {}, allowed with "
                      "parallel.sequence_parallel: a multiple of the {} ranks of tp",
                      what, ids.size(1), parts);
}

void GPTModel::check(const GPTInput& input) const {
  const int64_t parts = sequence_parallel_ ? tensor_parallel_.size() : 1;
  if (stage_.has_embedding) {
    check_ids(input.tokens, "tokens");
    check_token_ids(input.tokens, config_.vocab_size, /*may_be_ignored=*/false, "GPTModel: tokens");
  } else {
    check_hidden(input.hidden, stage_.has_loss ? input.labels : at::Tensor(), config_, parts,
                 {config_, context_parallel_.size()});
  }
  const int64_t sequence =
      stage_.has_embedding ? input.tokens.size(1) : input.hidden.size(0) * parts;
  check_positions(input.positions.positions, "positions", sequence, config_);
  const int64_t batch = stage_.has_embedding ? input.tokens.size(0) : input.hidden.size(1);
  check_documents(input.positions, batch, sequence, context_parallel_.size(), config_);
  const bool cut = sequence_parallel_ || context_parallel_.size() > 1;
  check_cache(input.positions.cache.get(), input.positions, sequence, config_, cut);
  check_last_only(input, sequence, cut);
  if (!stage_.has_loss || !input.labels.defined()) return;
  check_ids(input.labels, "labels");
  require<UsageError>(!stage_.has_embedding || input.labels.sizes() == input.tokens.sizes(),
                      "GPTModel: labels: the shape must be that of tokens ({})",
                      fmt::join(input.tokens.sizes(), " x "));
  check_token_ids(input.labels, config_.vocab_size, /*may_be_ignored=*/true, "GPTModel: labels");
}

at::Tensor GPTModel::output(const at::Tensor& hidden, const at::Tensor& labels) const {
  if (!labels.defined())
    return gather_from_group(output_table_->logits(hidden), tensor_parallel_, 2,
                             GradientState::complete, "logits")
        .narrow(2, 0, config_.vocab_size)
        .transpose(0, 1)
        .contiguous();
  const at::Tensor losses = output_table_->losses(
      hidden, labels.t().contiguous().flatten(), config_.cross_entropy_chunk_size,
      output_table_->is_training() ? config_.label_smoothing : 0);
  return losses.view({labels.size(1), labels.size(0)}).t();
}

TokenPositions GPTModel::positions_of(const GPTInput& input) const {
  TokenPositions result = input.positions;
  const bool continues = result.cache && result.cache->length() > 0;
  if (result.positions.defined() || (context_parallel_.size() == 1 && !continues)) return result;
  const int64_t parts = sequence_parallel_ ? tensor_parallel_.size() : 1;
  const at::Tensor& given = stage_.has_embedding ? input.tokens : input.hidden;
  const int64_t length = stage_.has_embedding ? given.size(1) : given.size(0) * parts;
  if (continues)
    result.positions =
        upload(at::arange(result.cache->length(), result.cache->length() + length), given.device());
  else
    result.positions = upload(context_positions(length, context_parallel_), given.device());
  return result;
}

at::Tensor GPTModel::forward(const GPTInput& input) const {
  check(input);
  const TokenPositions positions = positions_of(input);
  const at::Tensor hidden = decoder_->forward(
      stage_.has_embedding ? embedding_->forward(input.tokens, positions) : input.hidden,
      positions);
  const int64_t length = hidden.size(0);
  const at::Tensor result =
      stage_.has_loss
          ? output(input.last_only ? hidden.narrow(0, length - 1, 1) : hidden, input.labels)
          : hidden;
  if (positions.cache) positions.cache->advance(length);
  return result;
}

at::Tensor GPTModel::forward(const at::Tensor& tokens, const at::Tensor& labels) const {
  return forward(GPTInput{.tokens = tokens, .labels = labels});
}

}  // namespace lockstep
