#pragma once

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/config.h"

namespace lockstep {

using NamedTensors = std::map<std::string, at::Tensor>;

/// Tensors that are read one at a time, so that not all need be in memory. On the device `meta`
/// they have shapes but no values, so such a source tells in advance what another one will give.
class TensorSource {
 public:
  virtual ~TensorSource() = default;
  virtual std::vector<std::string> names() const = 0;
  /// UsageError or FileError if there is no such tensor.
  virtual at::Tensor read(const std::string& name) const = 0;
};

/// Takes tensors one after another.
using TensorSink = std::function<void(const std::string& name, const at::Tensor& tensor)>;

/// The weights of a GPTModel, by their global names and without padding, as Hugging Face's
/// transformers names and shapes them. GPT-2: `transformer.h.0.attn.c_attn.weight` [hidden, 3
/// hidden] holds the queries, keys and values of all heads one after the other, transposed. The
/// other families: `model.layers.0.self_attn.q_proj.weight` [heads * channels, hidden], ..., with
/// each expert's matrices separate (`mlp.experts.0.gate_proj.weight`, in Mixtral
/// `block_sparse_moe.experts.0.w1.weight`). The rotated channels have the same order in both.
/// `model` is resolved. `write` gets contiguous tensors, in an order that depends only on `model`;
/// at any moment only one weight and its converted form are in memory.
void to_hugging_face(const TransformerConfig& model, const TensorSource& weights,
                     const TensorSink& write);
NamedTensors to_hugging_face(const TransformerConfig& model, const NamedTensors& weights);

/// The linear layers in transformers that correspond to the layer with the weight `name`, by their
/// modules ("model.layers.0.self_attn.q_proj"), each with its part of `rows` [out..., columns] of
/// the layer's outputs: [out, columns], never transposed. UsageError: no such weight.
std::vector<std::pair<std::string, at::Tensor>> linears_in_hugging_face(
    const TransformerConfig& model, const std::string& name, const at::Tensor& rows);

/// The other direction. `path` is used in messages. FileError: a tensor that is missing or has
/// another shape. The names of GPT-2 may lack "transformer.". Tensors that hold no weight
/// (`attn.bias`, `attn.masked_bias`, `rotary_emb.inv_freq`, an exact copy of the embeddings as tied
/// output layer) are skipped; any other tensor that is left over is an error. Order and memory as
/// above.
void from_hugging_face(const TransformerConfig& model, const TensorSource& tensors,
                       const std::string& path, const TensorSink& write);
NamedTensors from_hugging_face(const TransformerConfig& model, const NamedTensors& tensors,
                               const std::string& path);

}  // namespace lockstep
