#include "lockstep/planner/activation_plan.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "lockstep/core/attention_rules.h"
#include "lockstep/core/expert_rules.h"
#include "lockstep/core/recompute_rules.h"
#include "lockstep/planner/attention_plan.h"

namespace lockstep {
namespace {

using activation_bytes::product;
using activation_bytes::sum;

/// The terms of activation_plan.h.
class Activations {
 public:
  explicit Activations(const Config& config) : Activations(config, ActivationSizes(config)) {}

  Activations(const Config& config, const ActivationSizes& sizes)
      : config_(config.model),
        attention_(config, sizes),
        layout_{config.parallel.tensor_model_parallel_size, config.parallel.context_parallel_size,
                config.parallel.expert_tensor_parallel_size.value_or(
                    config.parallel.tensor_model_parallel_size),
                config.parallel.expert_model_parallel_size},
        widths_(sizes.widths),
        sequence_(sizes.sequence),
        batch_(sizes.batch),
        tokens_(sizes.tokens),
        own_tokens_(sizes.own_tokens),
        element_(sizes.element),
        wide_(sizes.wide),
        lora_(config.lora),
        chunk_(config.model.cross_entropy_chunk_size),
        on_cuda_(config.train.device == DeviceChoice::cuda),
        wider_buffers_(element_ < wide_ && config.ddp.grad_reduce_in_fp32),
        defers_weights_(config.parallel.pipeline_schedule == PipelineScheduleFamily::zb_h1),
        saved_parts_(
            config_.distribute_saved_activations ? config.parallel.tensor_model_parallel_size : 1) {
  }

  /// `number`: that of the layer in the whole model.
  int64_t layer(int64_t number) const {
    return sum(norm(), attention_.layer(number), norm(),
               has_experts(config_, number) ? experts() : feed_forward(widths_.ffn), adapters());
  }
  /// What the gradients of a layer's matrices need, if they wait: the matrices' inputs and the
  /// gradients of their outputs, of all ranks' tokens where sequence parallelism gathers them.
  int64_t deferred() const {
    if (!defers_weights_ || lora_.rank || config_.multi_latent_attention) return 0;
    const int64_t own = product(own_tokens_, config_.hidden_size, element_);
    const int64_t all = product(tokens_, config_.hidden_size, element_);
    const int64_t attention = sum(attention_.query_bytes(), attention_.key_bytes());
    return sum(product(2, own), product(2, attention), product(2, all),
               inside(tokens_, widths_.ffn));
  }
  /// The part of a layer that backward computes again with selective recomputation.
  int64_t attention_core(int64_t number) const { return attention_.core(number); }
  /// The part that the layers of a chunk share.
  int64_t positions(const ModelChunk& chunk) const { return attention_.positions(chunk); }
  /// The part of its input that a recomputed layer keeps.
  int64_t layer_input() const {
    return product(own_tokens_, config_.hidden_size / saved_parts_, element_);
  }

  /// Whether kept activations wait in host memory.
  bool offloads() const { return config_.offload_activations && on_cuda_; }

  /// The part of a stage's input that the pipeline keeps. Recomputed layers share it unless they
  /// keep parts, or copies on the host.
  int64_t stage_input() const {
    return saved_parts_ == 1 && !offloads() ? 0
                                            : product(own_tokens_, config_.hidden_size, element_);
  }

  int64_t embedding() const { return token_ids(); }
  /// The logits, or none of them if computed in chunks; for each token the sums and the loss.
  int64_t output() const {
    const int64_t sums = config_.label_smoothing > 0 ? 4 : 3;
    return sum(norm(), kept_logits(), product(sums + 1, tokens_, wide_), token_ids());
  }
  int64_t kept_logits() const { return chunk_ ? 0 : logits(tokens_); }
  /// Whether what the weights' gradients need stays until after backward.
  bool defers_weights() const { return defers_weights_; }
  /// The gradient of the rows of the word embeddings. If the table is also the output layer's, both
  /// gradients exist at a time unless the products add theirs to the buffer.
  int64_t table_gradient() const {
    return lora_.rank ? 0 : product(widths_.vocabulary, config_.hidden_size, element_);
  }
  int64_t tied_gradient() const {
    const bool in_place = wider_buffers_ || (chunk_ && !is_narrow());
    return config_.untie_embeddings_and_output_weights || in_place ? 0 : table_gradient();
  }
  /// Backward's memory for the output: the gradient of its input, and with sequence parallelism the
  /// input of all ranks; in chunks, also the logits of one chunk.
  int64_t output_gradients() const {
    const int64_t hidden = product(tokens_, config_.hidden_size, element_);
    const int64_t gathered = own_tokens_ < tokens_ ? hidden : 0;
    if (!chunk_) return sum(hidden, widened_output(tokens_), gathered);
    const int64_t tokens = std::min(*chunk_, tokens_);
    int64_t in_chunk = sum(logits(tokens), widened_output(tokens));
    if (is_narrow() && !wider_buffers_)
      in_chunk = sum(table_gradient() / element_ * wide_, std::max(in_chunk, table_gradient()));
    return sum(in_chunk, hidden, gathered);
  }
  /// The gradients of a layer's output and of its residual.
  int64_t hidden_gradients() const {
    return product(2, own_tokens_, config_.hidden_size, element_);
  }
  /// The gradients that backward holds while it is inside a layer without experts.
  int64_t layer_gradients() const { return sum(hidden_gradients(), inside(tokens_, widths_.ffn)); }

 private:
  bool is_narrow() const { return element_ < wide_; }

  /// On the CPU the operands of the weight's gradient are widened, 256 tokens at a time.
  int64_t widened_output(int64_t tokens) const {
    if (!(wider_buffers_ || (chunk_ && is_narrow())) || on_cuda_ || lora_.rank) return 0;
    return product(std::min<int64_t>(tokens, 256), sum(widths_.vocabulary, config_.hidden_size),
                   wide_);
  }

  int64_t logits(int64_t tokens) const { return product(tokens, widths_.vocabulary, element_); }

  /// Ids are turned into [sequence, batch], which is a copy if both are more than 1.
  int64_t token_ids() const { return sequence_ > 1 && batch_ > 1 ? product(tokens_, 8) : 0; }

  int64_t norm() const {
    const int64_t hidden = product(own_tokens_, config_.hidden_size);
    const bool centred = config_.normalization == Normalization::LayerNorm;
    return sum(product(2, hidden, element_), product(centred ? 2 : 1, own_tokens_, wide_));
  }

  int64_t adapters() const {
    if (!lora_.rank) return 0;
    int64_t bytes = 0;
    for (const std::string& target : lora_.target_modules) {
      const bool rows = target == "linear_proj" || target == "linear_fc2";
      const int64_t in = target == "linear_proj"  ? widths_.heads * *config_.kv_channels
                         : target == "linear_fc2" ? widths_.ffn
                                                  : config_.hidden_size;
      const int64_t dropped = lora_.dropout > 0 ? element_ : 0;
      bytes = sum(bytes, product(own_tokens_, *lora_.rank, element_),
                  product(rows ? tokens_ : own_tokens_, in, dropped));
    }
    return bytes;
  }

  int64_t feed_forward(int64_t width) const { return inside(tokens_, width); }

  /// The memory between the two matrices of a feed-forward network.
  int64_t inside(int64_t rows, int64_t width) const {
    const bool gated = config_.activation == Activation::swiglu;
    return product(gated ? 3 : 2, rows, width, element_);
  }

  int64_t experts() const {
    const int64_t hidden = config_.hidden_size, copies = layout_.expert_tensor_ranks;
    const int64_t tokens = tokens_ / layout_.tensor_ranks, chosen = rows_of(tokens);
    const int64_t rows = product(chosen, copies);
    const int64_t shared = config_.moe_shared_expert_intermediate_size.value_or(0);
    return input_of_experts() - product(own_tokens_, hidden, element_) +
           sum(router(tokens), row_order(tokens, chosen, rows), product(rows, hidden, element_),
               inside(rows, *config_.moe_ffn_hidden_size / copies),
               product(chosen, hidden, element_), product(chosen, element_),
               feed_forward(shared / layout_.tensor_ranks));
  }

  /// The mappings between tokens and rows; `pairs` and `rows` as in activation_plan.h.
  int64_t row_order(int64_t tokens, int64_t pairs, int64_t rows) const {
    const bool sorted = config_.moe_token_dispatcher_type == TokenDispatcher::alltoall;
    const int64_t ranks = product(layout_.expert_ranks, layout_.expert_tensor_ranks);
    const int64_t own = *config_.num_experts / layout_.expert_ranks;
    const int64_t seen = sorted ? tokens : product(tokens, ranks);
    const int64_t experts = sorted ? *config_.num_experts : own;
    const bool some_miss =
        config_.moe_expert_capacity_factor || (!sorted && layout_.expert_ranks > 1);
    const bool by_blocks = sorted && ranks > 1 && own > 1;
    const int64_t gathered = sorted ? experts : *config_.num_experts;  // the choices of all experts
    return sum(product(16, sorted ? pairs : rows), product(8, seen, experts),
               product(seen, gathered),
               product(some_miss ? 9 : 8, seen, std::min(config_.moe_router_topk, experts)),
               product(4, own), by_blocks ? product(16, rows) : 0);
  }

  /// The part of the norm's output that is kept before experts: if the ranks of tp have the same
  /// tokens, the router has a copy of its share.
  int64_t input_of_experts() const {
    const bool shared = config_.moe_shared_expert_intermediate_size.has_value();
    const bool copied = layout_.tensor_ranks > 1 && own_tokens_ == tokens_;
    const int64_t whole = product(own_tokens_, config_.hidden_size, element_);
    const bool routed = element_ == wide_;  // otherwise the widened copy is kept
    if (!copied) return shared || routed ? whole : 0;
    return sum(shared ? whole : 0, routed ? whole / layout_.tensor_ranks : 0);
  }

  /// The number of pairs of a token and an expert, if all experts get the same number.
  int64_t rows_of(int64_t tokens) const {
    const int64_t topk = config_.moe_router_topk, pairs = product(tokens, topk);
    if (!config_.moe_expert_capacity_factor) return pairs;
    const int64_t experts = *config_.num_experts;
    // A device that does not wait has room for the case that one rank's tokens take all.
    const bool waits = !on_cuda_ || layout_.expert_ranks > 1;
    const int64_t ranks = waits ? 1 : product(layout_.tensor_ranks, layout_.context_ranks);
    const double capacity =
        std::ceil(static_cast<double>(product(pairs, ranks)) / static_cast<double>(experts) *
                  *config_.moe_expert_capacity_factor);
    const auto taken = static_cast<int64_t>(std::min(capacity, static_cast<double>(tokens)));
    const int64_t room = product(experts, taken);
    return config_.moe_pad_expert_input_to_capacity ? room : std::min(pairs, room);
  }

  int64_t router(int64_t tokens) const {
    const int64_t experts = *config_.num_experts, scores = product(tokens, experts, wide_);
    const int64_t chosen = product(tokens, config_.moe_router_topk);
    const bool sigmoid = config_.moe_router_score_function == RouterScoreFunction::sigmoid;
    const bool over_all = sigmoid || config_.moe_router_pre_softmax;
    const int64_t widened =
        element_ == wide_ ? 0 : product(tokens + experts, config_.hidden_size, wide_);
    const int64_t divided = sigmoid && config_.moe_router_topk > 1
                                ? sum(product(chosen, wide_), product(tokens, wide_))
                                : 0;
    const bool with_logits = !over_all && config_.moe_z_loss_coeff == 0;  // kept once
    const int64_t weights =
        sum(over_all ? scores : product(chosen, wide_), with_logits ? scores : 0, divided);
    const int64_t dropped = config_.moe_expert_capacity_factor ? product(tokens, experts) : 0;
    return sum(widened, product(chosen, 8), weights, dropped, router_losses(tokens, sigmoid));
  }

  int64_t router_losses(int64_t tokens, bool sigmoid) const {
    const int64_t experts = *config_.num_experts, scores = product(tokens, experts, wide_);
    const bool by_sequence =
        config_.moe_router_load_balancing_type == RouterLoadBalancing::seq_aux_loss;
    const int64_t fractions = product(by_sequence ? batch_ : 1, experts, wide_);
    const int64_t sums = sigmoid ? product(tokens, wide_) : 0;
    return sum(config_.moe_aux_loss_coeff > 0 ? sum(scores, fractions, sums) : 0,
               config_.moe_z_loss_coeff > 0 ? sum(scores, product(tokens, wide_)) : 0);
  }

  struct Layout {
    int64_t tensor_ranks;
    int64_t context_ranks;
    int64_t expert_tensor_ranks;
    int64_t expert_ranks;
  };

  const TransformerConfig& config_;
  AttentionPlan attention_;
  Layout layout_;
  LocalWidths widths_;
  int64_t sequence_;
  int64_t batch_;
  int64_t tokens_;
  int64_t own_tokens_;  ///< between the tensor-parallel regions
  int64_t element_;
  int64_t wide_;
  const LoraConfig& lora_;
  std::optional<int64_t> chunk_;  ///< tokens whose logits exist at a time
  bool on_cuda_;
  bool wider_buffers_;  ///< gradient buffers are wider than gradients
  bool defers_weights_;
  int64_t saved_parts_;
};

}  // namespace

int64_t element_bytes(Precision precision) {
  if (precision == Precision::fp64) return 8;
  return precision == Precision::fp32 ? 4 : 2;
}

ActivationPlan plan_activations(const Config& config, const ModelChunk& chunk,
                                int64_t first_layer) {
  const Activations activations(config);
  const std::vector<int64_t> pieces = recomputed_pieces(config.model, chunk.num_layers);
  ActivationPlan plan;
  int64_t largest_recomputed = 0, next = 0;
  for (const int64_t num_layers : pieces) {
    int64_t piece = 0;
    for (const int64_t end = next + num_layers; next < end; ++next) {
      piece = sum(piece, activations.layer(first_layer + next));
      plan.deferred = sum(plan.deferred, activations.deferred());
    }
    largest_recomputed = std::max(largest_recomputed, piece);
    int64_t& kept = activations.offloads() ? plan.on_host : plan.layers;
    kept = sum(kept, activations.layer_input());
  }
  if (activations.offloads() && !pieces.empty())
    largest_recomputed = sum(largest_recomputed, product(2, activations.layer_input()));
  int64_t largest_offloaded = 0;
  const int64_t num_offloaded = activations.offloads() ? chunk.num_layers - next : 0;
  for (; next < chunk.num_layers; ++next) {
    const int64_t layer = activations.layer(first_layer + next);
    int64_t& kept = activations.offloads() ? plan.on_host : plan.layers;
    kept = sum(kept, layer);
    plan.deferred = sum(plan.deferred, std::max(layer, activations.deferred()));
    if (activations.offloads()) largest_offloaded = std::max(largest_offloaded, layer);
  }
  if (num_offloaded > 0 && pieces.empty())
    plan.layers = sum(plan.layers, activations.layer_input());
  const int64_t there = product(std::min<int64_t>(num_offloaded, 2), largest_offloaded);
  plan.layers =
      sum(plan.layers, pieces.empty() || chunk.has_embedding ? 0 : activations.stage_input(),
          activations.positions(chunk));
  plan.ends = sum(chunk.has_embedding ? activations.embedding() : 0,
                  chunk.has_output ? activations.output() : 0);
  const bool selective = config.model.recompute_granularity == RecomputeGranularity::selective;
  for (int64_t i = 0; selective && i < chunk.num_layers; ++i)
    largest_recomputed = std::max(largest_recomputed, activations.attention_core(first_layer + i));
  const int64_t freed = activations.defers_weights() ? 0 : sum(plan.layers, plan.ends);
  const int64_t in_embedding = chunk.has_embedding ? activations.table_gradient() - freed : 0;
  if (!chunk.has_output) {
    plan.working = std::max(sum(largest_recomputed, there), in_embedding);
    return plan;
  }
  const bool full = config.model.recompute_granularity == RecomputeGranularity::full;
  const int64_t gradients = chunk.num_layers > 0 ? activations.layer_gradients() : 0;
  const int64_t in_layer = full ? largest_recomputed + activations.hidden_gradients()
                                : std::max(largest_recomputed, gradients);
  const int64_t logits = activations.defers_weights() ? 0 : activations.kept_logits();
  plan.working = sum(there, std::max(activations.output_gradients(), in_layer - logits));
  if (!chunk.has_embedding) return plan;
  plan.working = sum(activations.tied_gradient(), std::max(plan.working, in_embedding));
  return plan;
}

int64_t rotary_table_bytes(const Config& config, const ModelChunk& chunk) {
  const TransformerConfig& model = config.model;
  if (model.position_embedding_type != PositionEmbeddingType::rope || chunk.num_layers == 0)
    return 0;
  const int64_t wide = std::max<int64_t>(element_bytes(config.train.precision), 4);
  return product(2, model.seq_length, rotated_channels(model) / 2, wide);
}

}  // namespace lockstep
