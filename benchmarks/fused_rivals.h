#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

namespace lockstep::benchmarks {

/// Sizes of a model whose layers are measured.
struct ModelSize {
  std::string name;
  int64_t sequence, batch, hidden, ffn, heads;

  int64_t channels() const { return hidden / heads; }
  int64_t tokens() const { return sequence * batch; }
};

/// Two ways to the same values, each a forward.
struct Rivals {
  std::string name;
  std::function<std::vector<at::Tensor>()> ours, libtorch;
};

/// Norms with a residual, SwiGLU, rotary embedding, dropout with a residual, attention with grouped
/// queries.
std::vector<Rivals> layer_rivals(const ModelSize& size, const at::TensorOptions& options);

/// The loss of `tokens` tokens. libtorch's takes bf16 logits in fp32, as autocast does. `smoothing`
/// is a share as libtorch counts it.
Rivals cross_entropy_rivals(const std::string& name, int64_t tokens, int64_t vocab_size,
                            double smoothing, const at::TensorOptions& options);

/// Output layer and loss, ours in chunks of so many tokens.
Rivals chunked_loss_rivals(const ModelSize& size, int64_t vocab_size, int64_t chunk,
                           const at::TensorOptions& options);

/// A linear layer whose weight's gradient is added up in fp32.
Rivals linear_rivals(const std::string& name, const ModelSize& size, int64_t outputs,
                     const at::TensorOptions& options);

/// Random gradients of what `forward` returns.
std::vector<at::Tensor> random_grads(const std::function<std::vector<at::Tensor>()>& forward);

}  // namespace lockstep::benchmarks
