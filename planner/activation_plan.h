#pragma once

#include <cstdint>

#include "lockstep/core/config.h"
#include "lockstep/planner/stage_shapes.h"

/// The exact number of bytes that autograd keeps of a micro-batch for backward, as measured for
/// GPTModel on the CPU with libtorch 2.11. Taken from the operations' saved tensors; each piece of
/// memory counts once. (The estimate of Korthikanti et al., "Reducing Activation Recomputation in
/// Large Transformer Models", 2022, 34 sbh bytes per layer, is for other operations: theirs have no
/// gate and use half precision throughout.)
///
/// With T = sequence * micro-batch tokens of a rank, h = hidden_size, q = query heads * channels,
/// k = key heads * channels, f = ffn_hidden_size, V = vocabulary (q, k, f, V on one rank of tp), e
/// bytes per element, w = max(e, 4), and t = T, or with sequence parallelism T / tp:
///
/// - norms: input and output 2 t h e, root t w, with LayerNorm also the mean t w. Two per layer,
///   and the final one.
/// - dropout: nothing, because backward generates its random numbers again.
/// - attention: q T e for the queries; q T e for the output; T * heads * w for log-sum-exp; keys
///   and values expanded over the query heads, 2 q T e. On CUDA, with e < w and without attention
///   dropout, they are not expanded but take 2 k T e. If each query head has its own key head, or
///   there is one key head, they are 2 k T e on any device; without rotation q is then that of all
///   ranks that share a query group. With attention dropout, for a sequence of S tokens,
///   S^2 + T S * heads (w + e) in place of the log-sum-exp, with attention bounded by documents a
///   mask of S^2 for each sample; one key head is then expanded for more
///   than one sample. With a window of fewer tokens than the sequence, or with attention bounded by
///   documents, and without dropout, keys and values are kept once, 2 k T e, neither expanded nor
///   as views; queries that are a view of linear_qkv's output keep all of it. qk_layernorm adds the
///   norms' input, linear_qkv's output, with q T e for queries that are not a view of it, and the
///   norms' roots, with LayerNorm also their means, T (heads + key heads) w each; without rotation
///   keys are then kept, too, unless keys and values are kept once.
/// - attention over C > 1 context-parallel ranks, where T and S are those of one rank: as with a
///   window. With all_gather keys and values are those of all ranks, 2 C k T e. With a2a, and with
///   a2a+p2p if the first level has several ranks, the tensor that was exchanged takes the place of
///   the queries, (q + 2 k) T e, and the output is kept as it was computed and as it was sent back,
///   2 q T e. The positions of tokens take 8 S, once for all layers, if rotation, a learned table,
///   dropout or recomputation uses them.
/// - latent attention instead, for heads of W = max(qk_head_dim + qk_pos_emb_head_dim, v_head_dim)
///   channels: queries, keys and values 3 T heads W e; the output T heads v_head_dim e and, if the
///   fused operation's is wider, T heads W e; log-sum-exp or dropout's as above; for each
///   compressed vector of r elements t r e, with qk_layernorm 2 t r e + t w, with LayerNorm 2 t w.
///   Over C context-parallel ranks queries, keys and values take (1 + 2 C) T heads W e with
///   all_gather; with an exchange of heads 5 T heads W e, and the output T heads W e counts always.
/// - feed-forward: SwiGLU 3 f T e (its input, the product), GELU 2 f T e.
/// - experts, for t = T / tp tokens, E experts, k chosen, P = t k pairs (what capacity leaves or
///   fills up; on CUDA without expert parallelism what it would leave to one rank of tp and cp),
///   R = P * expert-tp rows, F = moe_ffn_hidden_size / expert-tp, if experts get the same number:
///   choice 8 t k, weights t k w and logits t E w (t E w where scores are over all experts, and
///   with sigmoid t (k + 1) w for their sum), t h e of the norm's output, in half precision
///   (t + E) h 4 instead, with a capacity t E; the order of the pairs 16 P + 9 t E + 8 t k (with
///   allgather 16 R, and t of all ranks that gather, in 8 t E with this rank's experts), with a
///   capacity 9 t k, 4 for each expert of the rank, and 16 R with alltoall over several ranks that
///   have several experts each; R h e, the feed-forward's bytes for R rows of width F;
///   P h e + P e for the outputs. The losses of the router t E w each (balancing: and the
///   fractions, with sigmoid t w; z: t w). The shared expert counts as a feed-forward network that
///   keeps all of the norm's output.
/// - output: logits T V e, including padding, which backward overwrites with their gradient; for
///   each token the highest logit, two sums (three with label smoothing) and the loss, T w each.
///   With cross_entropy_chunk_size no logits. Token ids in the order of the layers, 8 T for the
///   embedding and 8 T for the output, if sequence and micro-batch exceed 1.
///
/// Full recomputation keeps only the input of a layer, or with recompute_method = uniform of a
/// piece of several layers: t h e, or with distribute_saved_activations a rank's part of it,
/// besides the input of a later stage, which the pipeline keeps. Selective recomputation keeps, for
/// the attention core, the queries, keys and values as they arrive, and the output; backward holds
/// the rest.
///
/// With lora.rank r this is an upper bound: the same, and for each adapter what its B multiplies,
/// t r e, and with lora.dropout its input after dropout. Frozen layers keep less.
namespace lockstep {

struct ActivationPlan {
  int64_t layers = 0;  ///< bytes of the chunk's layers
  /// With model.offload_activations on CUDA: bytes that wait in host memory, of the inputs of
  /// recomputed layers and of the other layers. They are not part of `layers`, which still includes
  /// the input of a first layer that is not recomputed.
  int64_t on_host = 0;
  /// Under ZB-H1, the bytes of the chunk's layers between a micro-batch's backward and its weight
  /// gradients: (4 h + 2 q + 2 k + 3 f) e for each of the T tokens, with GELU 2 f instead of 3 f,
  /// of which sequence parallelism cuts 2 h e; but at least what a layer that is not recomputed
  /// keeps. With latent attention or adapters the same as before backward.
  int64_t deferred = 0;
  int64_t ends = 0;  ///< bytes of embedding and output
  /// Bytes that backward needs in addition, the largest of:
  /// - in the output layer: the gradient of its input, T h e, and with sequence parallelism the
  ///   input of all ranks, T h e; on the CPU with e < w 256 tokens of its operands, 256 (V + h) w;
  ///   with cross_entropy_chunk_size = C the logits of a chunk, C V e, and with gradients of e < w
  ///   bytes the sum of the weight's gradient, V h w, and at the end its copy, V h e.
  /// - in a layer, when the logits T V e are free (under ZB-H1 they are not): 2 t h e and the
  ///   gradients of the feed-forward network; or one recomputed layer, piece or attention core. An
  ///   upper bound if other layers after it are free by then. With model.offload_activations on
  ///   CUDA also two inputs of recomputed layers, and in each of the three cases two of the largest
  ///   layers that are not recomputed.
  /// - on the stage of the embedding, when all layers are free (under ZB-H1 they are not): V h e of
  ///   the embedding's gradient. With the output on the same stage, tied tables, e = w and all
  ///   logits at once, V h e more in each of the three cases.
  int64_t working = 0;
};

/// The plan for one micro-batch in one chunk of a model. `first_layer` is the chunk's first layer
/// in the whole model. UsageError if it does not fit into 64 bits.
ActivationPlan plan_activations(const Config& config, const ModelChunk& chunk, int64_t first_layer);

/// Bytes of the cosine and sine tables that a chunk's layers share, which live as long as the
/// model.
int64_t rotary_table_bytes(const Config& config, const ModelChunk& chunk);

/// Bytes of an element of the parameters and activations.
int64_t element_bytes(Precision precision);

}  // namespace lockstep
