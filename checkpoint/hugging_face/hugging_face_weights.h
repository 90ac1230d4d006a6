#pragma once

#include <map>
#include <string>

#include <ATen/core/Tensor.h>

#include "lockstep/core/config.h"

namespace lockstep {

using NamedTensors = std::map<std::string, at::Tensor>;

/// The weights of a GPTModel, by their global names and without padding, as Hugging Face's
/// transformers names and shapes them. GPT-2: `transformer.h.0.attn.c_attn.weight` [hidden, 3
/// hidden] holds the queries, keys and values of all heads one after the other, transposed. The
/// others: `model.layers.0.self_attn.q_proj.weight` [heads * channels, hidden], ..., each expert's
/// matrices apart (`mlp.experts.0.gate_proj.weight`, in Mixtral
/// `block_sparse_moe.experts.0.w1.weight`). The rotated channels have the same order in both.
/// `model` is resolved.
NamedTensors to_hugging_face(const TransformerConfig& model, const NamedTensors& weights);

/// The other direction. `path` stands in messages. FileError: a tensor that is missing or has
/// another shape. The names of GPT-2 may lack "transformer.". Tensors that hold no weight
/// (`attn.bias`, `attn.masked_bias`, `rotary_emb.inv_freq`, an exact copy of the embeddings as tied
/// output layer) are left out; any other that is left over is an error.
NamedTensors from_hugging_face(const TransformerConfig& model, NamedTensors tensors,
                               const std::string& path);

}  // namespace lockstep
