#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

namespace lockstep::benchmarks {

/// Sizes of the model whose layers are measured.
struct ModelSize {
  std::string name;
  int64_t sequence, batch, hidden, ffn, heads;

  int64_t channels() const { return hidden / heads; }
  int64_t tokens() const { return sequence * batch; }
};

/// A way to compute values: its forward, and the inputs that get gradients. Without inputs,
/// backward adds to the gradients of the leaves.
struct Rival {
  std::function<std::vector<at::Tensor>()> forward;
  std::vector<at::Tensor> inputs = {};

  /// Forward and backward. The gradients of `inputs` are dropped: in a model, the gradient of an
  /// activation goes to the previous layer, and nothing adds to it.
  void run(const std::vector<at::Tensor>& grads) const;
};

/// Reads of some tensors and writes of others, all of the same size.
struct MemoryPass {
  int64_t reads, writes;  ///< tensors: up to 3 and up to 2
  int64_t bytes;          ///< of each tensor
};

/// Two ways to compute the same values.
struct Rivals {
  std::string name;
  Rival ours, libtorch;
  /// What forward and backward must read and write; empty if they are not memory-bound.
  std::vector<MemoryPass> passes = {};

  int64_t least_bytes() const {
    int64_t bytes = 0;
    for (const MemoryPass& pass : passes) bytes += (pass.reads + pass.writes) * pass.bytes;
    return bytes;
  }
};

/// Norms with a residual, SwiGLU, rotary embedding, dropout with a residual, attention with grouped
/// queries.
std::vector<Rivals> layer_rivals(const ModelSize& size, const at::TensorOptions& options);

/// The loss of `tokens` tokens. libtorch takes bf16 logits in fp32, as autocast does. `smoothing`
/// is the label smoothing as libtorch defines it.
Rivals cross_entropy_rivals(const std::string& name, int64_t tokens, int64_t vocab_size,
                            double smoothing, const at::TensorOptions& options);

/// Output layer and loss, ours in chunks of `chunk` tokens.
Rivals chunked_loss_rivals(const ModelSize& size, int64_t vocab_size, int64_t chunk,
                           const at::TensorOptions& options);

/// A linear layer whose weight gradient is accumulated in fp32.
Rivals linear_rivals(const std::string& name, const ModelSize& size, int64_t outputs,
                     const at::TensorOptions& options);

/// Random gradients for the results of the rival's forward.
std::vector<at::Tensor> random_grads(const Rival& rival);

}  // namespace lockstep::benchmarks
