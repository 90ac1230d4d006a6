#pragma once

#include <cstdint>

#include "lockstep/core/config.h"
#include "lockstep/planner/stage_shapes.h"

/// Bytes of what autograd keeps of a micro-batch for backward, as measured of GPTModel on the CPU
/// with libtorch 2.11, exactly. Read off the operations' saved tensors; each piece of memory counts
/// once. (The estimate of Korthikanti et al., "Reducing Activation Recomputation in Large
/// Transformer Models", 2022, 34 sbh bytes a layer, is of other operations: theirs have no gate and
/// half precision throughout.)
///
/// With T = sequence * micro-batch tokens of a rank, h = hidden_size, q = query heads * channels,
/// k = key heads * channels, f = ffn_hidden_size, V = vocabulary (q, k, f, V on one rank of tp), e
/// bytes of an element and w = max(e, 4), and t = T, with sequence parallelism T / tp:
///
/// - norms: input and output 2 t h e, root t w, with LayerNorm the mean t w. Two a layer, and the
///   final one.
/// - dropout: nothing, since backward draws its numbers again.
/// - attention: q T e of queries; q T e of the output; T * heads * w of log-sum-exp; keys and
///   values spread over the query heads, 2 q T e. On CUDA, with e < w and without attention
///   dropout, they are not spread, but 2 k T e. Where each query head has its own key head, or
///   there is one key head, they are 2 k T e on any device; without rotation q is then that of
///   all ranks that share a query group. With attention dropout, for a sequence of S tokens, S^2 +
///   T S * heads (w + e) in place of the log-sum-exp; one key head is then spread for more than one
///   sample. With a window of fewer tokens than the sequence, or attention that documents
///   bound, and without dropout, keys and values are kept once, 2 k T e, neither spread nor as
///   views. qk_layernorm adds the norms' input, linear_qkv's output, with q T e of queries that are
///   no view of it, and the norms' roots, with LayerNorm their means, T (heads + key heads) w each;
///   without rotation keys are then kept, too.
/// - latent attention instead, for heads of W = max(qk_head_dim + qk_pos_emb_head_dim, v_head_dim)
///   channels: queries, keys and values 3 T heads W e; the output T heads v_head_dim e and, where
///   the fused operation's is wider, T heads W e; log-sum-exp or dropout's as above; of each
///   compressed vector of r elements t r e, with qk_layernorm 2 t r e + t w, with LayerNorm 2 t w.
/// - feed-forward: SwiGLU 3 f T e (its input, the product), GELU 2 f T e.
/// - experts, for t = T / tp tokens, E experts, k chosen, P = t k pairs (what capacity leaves or
///   fills up), R = P * expert-tp rows, F = moe_ffn_hidden_size / expert-tp, if experts get the
///   same number: choice 8 t k, weights t k w and logits t E w (t E w where scores are over all
///   experts, and with sigmoid t (k + 1) w for their sum), t h e of the norm's output, in half
///   precision (t + E) h 4 instead, with a capacity t E; the order of the pairs 16 P + 9 t E +
///   8 t k, with a capacity 9 t k, 4 for each expert of the rank, and 16 R with alltoall over
///   several ranks that have several experts each; R h e, the feed-forward's bytes for R rows of
///   width F; P h e + P e of outputs. The losses of the router t E w each (balancing: and the
///   fractions, with sigmoid t w; z: t w). The shared expert as a feed-forward network, which keeps
///   all of the norm's output.
/// - output: logits T V e, with padding, over which backward writes their gradient; of each token
///   the highest logit, two sums, with label smoothing three, and the loss, T w each. With
///   cross_entropy_chunk_size no logits. Token ids in the order of the layers, 8 T for the
///   embedding and 8 T for the output, if sequence and micro-batch exceed 1.
///
/// Recomputation keeps of a layer, or with recompute_method = uniform of a piece of several, its
/// input alone, t h e (full; with distribute_saved_activations a rank's part of it, beside the
/// input of a later stage, which the pipeline keeps), or of the attention core queries, keys,
/// values as they come, and the output (selective).
///
/// With lora.rank r an upper bound: the same, and of each adapter what its B multiplies, T r e,
/// beside a row-parallel layer and with sequence parallelism t r e, and with lora.dropout its input
/// dropped. Frozen layers keep less.
namespace lockstep {

struct ActivationPlan {
  int64_t layers = 0;  ///< bytes of the chunk's layers
  /// With model.offload_activations on CUDA: bytes of the inputs of recomputed layers, and of the
  /// other layers, which wait in the host's memory. Not among `layers`, where the input of a first
  /// layer that is not recomputed stays.
  int64_t on_host = 0;
  int64_t ends = 0;  ///< bytes of embedding and output
  /// Bytes that backward needs on top, the largest of:
  /// - in the output layer: the gradient of its input, T h e; on the CPU with e < w 256 tokens of
  ///   its operands, 256 (V + h) w; with cross_entropy_chunk_size = C the logits of a chunk, C V e,
  ///   and then with sequence parallelism the input of all ranks, T h e.
  /// - in a layer, when the logits T V e are free: 2 t h e and the gradients of the feed-forward
  ///   network; or one recomputed layer, piece or attention core. An upper bound where other layers
  ///   behind it are free by then. With model.offload_activations on CUDA two inputs of recomputed
  ///   layers more, and in each of the three two of the largest layers that are not recomputed.
  /// - on the stage of embedding and output, when all layers are free: V h e of the embedding's
  ///   gradient. With tied tables, e = w and all logits at once, V h e more in each of the three.
  int64_t working = 0;
};

/// Of one micro-batch in one chunk of a model. `first_layer` is the chunk's first layer in the
/// whole model. UsageError if it does not fit into 64 bits.
ActivationPlan plan_activations(const Config& config, const ModelChunk& chunk, int64_t first_layer);

/// Bytes of the tables of cosines and sines of a chunk's layers, which live as long as the model.
int64_t rotary_table_bytes(const Config& config, const ModelChunk& chunk);

/// Bytes of an element of the parameters and activations.
int64_t element_bytes(Precision precision);

}  // namespace lockstep
