#pragma once

#include "lockstep/core/config.h"

/// Floating-point operations of the model itself: those that any implementation needs, so that
/// recomputed activations do not count. Needs no libtorch.
namespace lockstep {

/// Operations in forward and backward for one token, as Megatron's num_floating_point_operations
/// counts them. `config` is resolved.
///
/// A matrix of m x n elements costs a token 2 m n operations in forward, and twice as many in
/// backward, for the gradients of its input and of its weights. The matrices are
///
/// - of attention: linear_qkv and linear_proj; with multi_latent_attention its four or five;
/// - of the feed-forward network: two, or three with SwiGLU; in a layer with experts, those of
///   moe_router_topk experts and of the shared one;
/// - of the output layer, with its padded vocabulary.
///
/// The two products of attention's core cost a token 4 q S / 2 operations in forward, for a
/// sequence of S tokens and q = num_attention_heads * kv_channels: on average a token sees half of
/// the others. With multi_latent_attention 4 q becomes 2 (q + num_attention_heads * v_head_dim).
/// With a window of W < S tokens S / 2 becomes W - W^2 / 2 S.
/// With lora.rank the matrices of the model are frozen and cost a token 4 m n operations; those of
/// the adapters cost 6 m n. Embedding, norms, activations and the router do not count.
/// (Megatron's function counts one product per element for the norms of latent attention.)
double model_flops_per_token(const Config& config);

/// Tokens that a token sees, on average over the sequence: S / 2 or W - W^2 / 2 S above.
double visible_tokens(const TransformerConfig& model);

}  // namespace lockstep
