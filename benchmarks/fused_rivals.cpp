#include "lockstep/benchmarks/fused_rivals.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/models/activation.h"
#include "lockstep/models/cross_entropy.h"
#include "lockstep/models/dropout.h"
#include "lockstep/models/linear_cross_entropy.h"
#include "lockstep/models/normalization.h"
#include "lockstep/models/rotary_embedding.h"

namespace lockstep::benchmarks {
namespace {

using Tensors = std::vector<at::Tensor>;
using Options = at::TensorOptions;

at::Tensor leaf(at::IntArrayRef shape, const Options& options) {
  return at::randn(shape, options).requires_grad_(true);
}

int64_t bytes_of(const at::Tensor& x) { return static_cast<int64_t>(x.nbytes()); }

/// Returns a leaf that already has a gradient, to which backward adds.
at::Tensor with_grad(const at::Tensor& x, at::ScalarType grad_dtype) {
  at::Tensor result = x.detach().requires_grad_(true);
  result.mutable_grad() = at::zeros(x.sizes(), x.options().dtype(grad_dtype));
  return result;
}

at::Tensor labels_of(int64_t tokens, int64_t vocab_size, const Options& options) {
  return at::randint(vocab_size, {tokens}, options.dtype(at::kLong));
}

ParallelState alone(const Options& options) {
  return ParallelState::single_process(options.device());
}

ParallelLinearOptions linear_options(const Options& options) {
  return {.group = alone(options).group(GroupKind::tp)};
}

/// A hook that waits for a gradient.
class Waiting : public torch::autograd::PostAccumulateGradHook {
  void operator()(const torch::autograd::Variable& /*parameter*/) override {}
};

LayerContext context_of(const ModelSize& size, const Options& options) {
  TransformerConfig config;
  config.hidden_size = size.hidden;
  config.num_attention_heads = size.heads;
  config.kv_channels = size.channels();
  config.seq_length = size.sequence;
  return {.config = config, .options = options, .state = alone(options)};
}

Rivals norm_rivals(const ModelSize& size, Normalization kind, const Options& options) {
  const auto norm = std::make_shared<Norm>(
      ParallelContext{.state = alone(options), .options = options, .name = "norm."}, size.hidden,
      kind, 1e-5);
  const at::Tensor x = leaf({size.sequence, size.batch, size.hidden}, options);
  const at::Tensor residual = leaf(x.sizes(), options);
  const at::Tensor weight = leaf({size.hidden}, options), bias = leaf({size.hidden}, options);
  const bool rms = kind == Normalization::RMSNorm;
  Rivals rivals;
  rivals.name = rms ? "residual + RMSNorm" : "residual + LayerNorm";
  rivals.ours = {[=]() -> Tensors {
                   const auto [sum, normalized] = norm->of_sum(x, residual);
                   return {sum, normalized};
                 },
                 {x, residual}};
  rivals.libtorch = {[=]() -> Tensors {
                       const at::Tensor sum = x + residual;
                       return {sum, rms ? at::rms_norm(sum, weight.sizes(), weight, 1e-5)
                                        : at::layer_norm(sum, weight.sizes(), weight, bias, 1e-5)};
                     },
                     {x, residual, weight}};
  for (const at::Tensor& parameter : norm->parameters()) rivals.ours.inputs.push_back(parameter);
  if (!rms) rivals.libtorch.inputs.push_back(bias);
  rivals.passes = {{2, 2, bytes_of(x)}, {3, 1, bytes_of(x)}};
  return rivals;
}

Rivals swiglu_rivals(const ModelSize& size, const Options& options) {
  const at::Tensor inner = leaf({size.sequence, size.batch, 2 * size.ffn}, options);
  return {"SwiGLU",
          {[=]() -> Tensors { return {activate(Activation::swiglu, inner)}; }, {inner}},
          {[=]() -> Tensors {
             const auto halves = inner.chunk(2, -1);
             return {at::silu(halves[0]) * halves[1]};
           },
           {inner}},
          {{2, 1, bytes_of(inner) / 2}, {3, 2, bytes_of(inner) / 2}}};
}

Rivals rotary_rivals(const ModelSize& size, const Options& options) {
  const auto rotary = std::make_shared<RotaryEmbedding>(context_of(size, options));
  const int64_t half = size.channels() / 2;
  const at::Tensor packed =
      leaf({size.sequence, size.batch, size.heads, 3, size.channels()}, options);
  const at::Tensor cos = at::randn({size.sequence, 1, 1, size.channels()}, options).cos();
  const at::Tensor sin = cos.sin();
  const auto turned = [=](const at::Tensor& heads) {
    const at::Tensor swapped = at::cat({heads.slice(3, half), heads.slice(3, 0, half)}, 3);
    return at::addcmul(heads * cos, swapped, sin);
  };
  return {"rotary embedding",
          {[=]() -> Tensors {
             const auto [query, key, value] = rotary->heads_of(packed, {0, 1});
             return {query, key, value};
           },
           {packed}},
          {[=]() -> Tensors {
             const auto parts = packed.split_with_sizes({1, 1, 1}, 3);
             return {turned(parts[0].squeeze(3)), turned(parts[1].squeeze(3)), parts[2].squeeze(3)};
           },
           {packed}}};
}

/// Dropout with probability 0.1, on a residual. libtorch draws its numbers from a generator.
Rivals dropout_rivals(const ModelSize& size, const Options& options) {
  const auto dropout = std::make_shared<Dropout>(context_of(size, options), 0.1);
  const at::Tensor x = leaf({size.sequence, size.batch, size.hidden}, options);
  const at::Tensor residual = leaf(x.sizes(), options);
  return {"dropout + residual",
          {[=]() -> Tensors { return {dropout->add(x, residual, {}, /*training=*/true)}; },
           {x, residual}},
          {[=]() -> Tensors { return {residual + at::dropout(x, 0.1, /*train=*/true)}; },
           {x, residual}},
          {{2, 1, bytes_of(x)}, {1, 1, bytes_of(x)}}};  // the residual's gradient is the result's
}

/// Keys and values unchanged against copies of them; causal_attention() copies them on the CPU.
Rivals grouped_attention_rivals(const ModelSize& size, const Options& options) {
  const int64_t groups = size.heads / 2;
  const at::Tensor query = leaf({size.batch, size.heads, size.sequence, size.channels()}, options);
  const at::Tensor key = leaf({size.batch, groups, size.sequence, size.channels()}, options);
  const at::Tensor value = leaf(key.sizes(), options);
  return {"grouped attention",
          {[=]() -> Tensors {
             return {at::scaled_dot_product_attention(query, key, value, {}, 0.0, true,
                                                      std::nullopt, /*enable_gqa=*/true)};
           },
           {query, key, value}},
          {[=]() -> Tensors {
             return {at::scaled_dot_product_attention(
                 query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), {}, 0.0, true)};
           },
           {query, key, value}}};
}

}  // namespace

std::vector<Rivals> layer_rivals(const ModelSize& size, const at::TensorOptions& options) {
  return {norm_rivals(size, Normalization::RMSNorm, options),
          norm_rivals(size, Normalization::LayerNorm, options),
          swiglu_rivals(size, options),
          rotary_rivals(size, options),
          dropout_rivals(size, options),
          grouped_attention_rivals(size, options)};
}

Rivals cross_entropy_rivals(const std::string& name, int64_t tokens, int64_t vocab_size,
                            double smoothing, const at::TensorOptions& options) {
  const at::Tensor ours = leaf({tokens, vocab_size}, options);
  const at::Tensor theirs = ours.detach().clone().requires_grad_(true);
  const at::Tensor labels = labels_of(tokens, vocab_size, options);
  const VocabPartition part = vocab_partition(vocab_size, vocab_size, 0, 1);
  const ProcessGroup group = alone(options).group(GroupKind::tp);
  const auto n = static_cast<double>(vocab_size);
  return {name,
          {[=]() -> Tensors {
             return {vocab_parallel_cross_entropy(ours.alias(), labels, part, group,
                                                  smoothing * (n - 1) / n, LogitsMemory::taken)};
           },
           {ours}},
          {[=]() -> Tensors {
             return {at::cross_entropy_loss(theirs.to(at::kFloat), labels, /*weight=*/{},
                                            at::Reduction::None, kIgnoredLabel, smoothing)};
           },
           {theirs}},
          {{1, 0, bytes_of(ours)}, {1, 1, bytes_of(ours)}}};
}

Rivals chunked_loss_rivals(const ModelSize& size, int64_t vocab_size, int64_t chunk,
                           const at::TensorOptions& options) {
  const at::Tensor x = leaf({size.tokens(), size.hidden}, options);
  const at::Tensor labels = labels_of(size.tokens(), vocab_size, options);
  const at::Tensor weight = with_grad(at::randn({vocab_size, size.hidden}, options), at::kFloat);
  const VocabPartition part = vocab_partition(vocab_size, vocab_size, 0, 1);
  const ParallelLinearOptions linear = linear_options(options);
  return {"output + loss, chunks",
          {[=]() -> Tensors {
            return {parallel_linear_cross_entropy(x, weight, labels, part, linear, chunk)};
          }},
          {[=]() -> Tensors {
            return {at::cross_entropy_loss(at::linear(x, weight).to(at::kFloat), labels,
                                           /*weight=*/{}, at::Reduction::None)};
          }}};
}

Rivals linear_rivals(const std::string& name, const ModelSize& size, int64_t outputs,
                     const at::TensorOptions& options) {
  const at::Tensor x = leaf({size.sequence, size.batch, size.hidden}, options);
  const at::Tensor ours = with_grad(at::randn({outputs, size.hidden}, options), at::kFloat);
  const at::Tensor theirs = with_grad(ours.detach().clone(), at::kFloat);
  torch::autograd::impl::set_post_acc_grad_hooks(ours, std::make_unique<Waiting>());
  const ParallelLinearOptions linear = linear_options(options);
  return {name,
          {[=]() -> Tensors { return {parallel_linear(x, ours, {}, linear)}; }},
          {[=]() -> Tensors { return {at::linear(x, theirs)}; }}};
}

void Rival::run(const Tensors& grads) const {
  const Tensors outputs = forward();
  if (inputs.empty()) return torch::autograd::backward(outputs, grads);
  (void)torch::autograd::grad(outputs, inputs, grads);
}

std::vector<at::Tensor> random_grads(const Rival& rival) {
  Tensors grads;
  for (const at::Tensor& output : rival.forward())
    grads.push_back(at::randn(output.sizes(), output.options()));
  return grads;
}

}  // namespace lockstep::benchmarks
