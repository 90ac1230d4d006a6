// Fused operations of layers, forward and backward, against the operators of libtorch that give the
// same, in fp32 unless the name says otherwise, round by round. Processor time of the process,
// which other programs disturb least.

#include <cstdio>
#include <cstdlib>
#include <ctime>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/benchmarks/interleaved.h"
#include "lockstep/models/activation.h"
#include "lockstep/models/cross_entropy.h"
#include "lockstep/models/linear_cross_entropy.h"
#include "lockstep/models/normalization.h"
#include "lockstep/models/rotary_embedding.h"

namespace lockstep::benchmarks {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr size_t kWarmups = 5, kRounds = 60, kBlocks = 3;

struct ModelSize {
  const char* name;
  int64_t sequence, batch, hidden, ffn, heads;
  int64_t channels() const { return hidden / heads; }
};

constexpr ModelSize kSizes[] = {{"tiny", 128, 8, 128, 384, 4}, {"small", 256, 4, 384, 1024, 6}};

at::Tensor leaf(at::IntArrayRef shape) { return at::randn(shape).requires_grad_(true); }

/// Two ways to the same values.
struct Rivals {
  const char* name;
  std::function<Tensors()> ours, libtorch;
};

LayerContext context_of(const ModelSize& size) {
  TransformerConfig config;
  config.hidden_size = size.hidden;
  config.num_attention_heads = size.heads;
  config.kv_channels = size.channels();
  config.seq_length = size.sequence;
  return {.config = config, .options = at::kFloat};
}

Rivals norm_rivals(const ModelSize& size, Normalization kind) {
  const auto norm = std::make_shared<Norm>(ParallelContext{.options = at::kFloat, .name = "norm."},
                                           size.hidden, kind, 1e-5);
  const at::Tensor x = leaf({size.sequence, size.batch, size.hidden}), residual = leaf(x.sizes());
  const at::Tensor weight = leaf({size.hidden}), bias = leaf({size.hidden});
  const bool rms = kind == Normalization::RMSNorm;
  return {rms ? "residual + RMSNorm" : "residual + LayerNorm",
          [=]() -> Tensors {
            const auto [sum, normalized] = norm->of_sum(x, residual);
            return {sum, normalized};
          },
          [=]() -> Tensors {
            const at::Tensor sum = x + residual;
            return {sum, rms ? at::rms_norm(sum, weight.sizes(), weight, 1e-5)
                             : at::layer_norm(sum, weight.sizes(), weight, bias, 1e-5)};
          }};
}

Rivals swiglu_rivals(const ModelSize& size) {
  const at::Tensor inner = leaf({size.sequence, size.batch, 2 * size.ffn});
  return {"SwiGLU", [=]() -> Tensors { return {activate(Activation::swiglu, inner)}; },
          [=]() -> Tensors {
            const auto halves = inner.chunk(2, -1);
            return {at::silu(halves[0]) * halves[1]};
          }};
}

Rivals rotary_rivals(const ModelSize& size) {
  const auto rotary = std::make_shared<RotaryEmbedding>(context_of(size));
  const int64_t half = size.channels() / 2;
  const at::Tensor packed = leaf({size.sequence, size.batch, size.heads, 3, size.channels()});
  const at::Tensor cos = at::randn({size.sequence, 1, 1, size.channels()}).cos();
  const at::Tensor sin = cos.sin();
  const auto turned = [=](const at::Tensor& heads) {
    const at::Tensor swapped = at::cat({heads.slice(3, half), heads.slice(3, 0, half)}, 3);
    return at::addcmul(heads * cos, swapped, sin);
  };
  return {"rotary embedding",
          [=]() -> Tensors {
            const auto [query, key, value] = rotary->heads_of(packed, {0, 1});
            return {query, key, value};
          },
          [=]() -> Tensors {
            const auto parts = packed.split_with_sizes({1, 1, 1}, 3);
            return {turned(parts[0].squeeze(3)), turned(parts[1].squeeze(3)), parts[2].squeeze(3)};
          }};
}

/// A leaf with a gradient of its own already, to which backward adds.
at::Tensor with_grad(const at::Tensor& x, at::ScalarType grad_dtype) {
  at::Tensor result = x.detach().requires_grad_(true);
  result.mutable_grad() = at::zeros(x.sizes(), grad_dtype);
  return result;
}

at::Tensor labels_of(int64_t tokens, int64_t vocab_size) {
  return at::randint(vocab_size, {tokens}, at::kLong);
}

/// `share` of label smoothing, as libtorch counts it.
Rivals cross_entropy_rivals(const char* name, int64_t tokens, int64_t vocab_size, double share) {
  const at::Tensor ours = with_grad(at::randn({tokens, vocab_size}), at::kFloat);
  const at::Tensor theirs = with_grad(ours.detach().clone(), at::kFloat);
  const at::Tensor labels = labels_of(tokens, vocab_size);
  const VocabPartition part = vocab_partition(vocab_size, vocab_size, 0, 1);
  const ProcessGroup group = ParallelState::single_process().group(GroupKind::tp);
  const auto n = static_cast<double>(vocab_size);
  return {name,
          [=]() -> Tensors {
            return {vocab_parallel_cross_entropy(ours.alias(), labels, part, group,
                                                 share * (n - 1) / n, LogitsMemory::taken)};
          },
          [=]() -> Tensors {
            return {at::cross_entropy_loss(theirs, labels, /*weight=*/{}, at::Reduction::None,
                                           kIgnoredLabel, share)};
          }};
}

ParallelLinearOptions alone() {
  return {.group = ParallelState::single_process().group(GroupKind::tp)};
}

Rivals chunked_loss_rivals(const ModelSize& size, int64_t vocab_size, int64_t chunk) {
  const int64_t tokens = size.sequence * size.batch;
  const at::Tensor x = leaf({tokens, size.hidden}), labels = labels_of(tokens, vocab_size);
  const at::Tensor weight = with_grad(at::randn({vocab_size, size.hidden}), at::kFloat);
  const VocabPartition part = vocab_partition(vocab_size, vocab_size, 0, 1);
  const ParallelLinearOptions options = alone();
  return {"output + loss, chunks",
          [=]() -> Tensors {
            return {parallel_linear_cross_entropy(x, weight, labels, part, options, chunk)};
          },
          [=]() -> Tensors {
            return {at::cross_entropy_loss(at::linear(x, weight), labels, /*weight=*/{},
                                           at::Reduction::None)};
          }};
}

/// Keys and values as they are against copies of them; causal_attention() copies them on the CPU.
Rivals grouped_attention_rivals(const ModelSize& size) {
  const int64_t groups = size.heads / 2;
  const at::Tensor query = leaf({size.batch, size.heads, size.sequence, size.channels()});
  const at::Tensor key = leaf({size.batch, groups, size.sequence, size.channels()});
  const at::Tensor value = leaf(key.sizes());
  return {"grouped attention",
          [=]() -> Tensors {
            return {at::scaled_dot_product_attention(query, key, value, {}, 0.0, true, std::nullopt,
                                                     /*enable_gqa=*/true)};
          },
          [=]() -> Tensors {
            return {at::scaled_dot_product_attention(query, key.repeat_interleave(2, 1),
                                                     value.repeat_interleave(2, 1), {}, 0.0, true)};
          }};
}

/// Somebody waits for a gradient.
class Waiting : public torch::autograd::PostAccumulateGradHook {
  void operator()(const torch::autograd::Variable& /*parameter*/) override {}
};

/// With gradients of weights in fp32.
Rivals linear_rivals(const char* name, const ModelSize& size, int64_t outputs,
                     at::ScalarType dtype) {
  const at::Tensor x = at::randn({size.sequence, size.batch, size.hidden}).to(dtype);
  x.requires_grad_(true);
  const at::Tensor ours = with_grad(at::randn({outputs, size.hidden}).to(dtype), at::kFloat);
  const at::Tensor theirs = with_grad(ours.detach().clone(), at::kFloat);
  torch::autograd::impl::set_post_acc_grad_hooks(ours, std::make_unique<Waiting>());
  const ParallelLinearOptions options = alone();
  return {name, [=]() -> Tensors { return {parallel_linear(x, ours, {}, options)}; },
          [=]() -> Tensors { return {at::linear(x, theirs)}; }};
}

double processor_seconds(const std::function<Tensors()>& forward, const Tensors& grads) {
  const std::clock_t begin = std::clock();
  torch::autograd::backward(forward(), grads);
  return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
}

void report(const ModelSize& size, const Rivals& rivals, int threads) {
  at::set_num_threads(threads);
  Tensors grads;
  for (const at::Tensor& output : rivals.ours())
    grads.push_back(at::randn(output.sizes()).to(output.scalar_type()));
  std::vector<Samples> samples(2);
  for (size_t round = 0; round < kRounds + kWarmups; ++round) {
    const double ours = processor_seconds(rivals.ours, grads);
    const double libtorch = processor_seconds(rivals.libtorch, grads);
    if (round < kWarmups) continue;
    samples[0].push_back(ours);
    samples[1].push_back(libtorch);
  }
  const Estimate ratio = estimate(samples, kBlocks, [](const auto& m) { return m[1] / m[0]; });
  std::printf("%-6s %-22s %8d %10.0f %13.0f   %.2f [%.2f, %.2f]\n", size.name, rivals.name, threads,
              median(samples[0]) * 1e6, median(samples[1]) * 1e6, ratio.value, ratio.low,
              ratio.high);
}

}  // namespace
}  // namespace lockstep::benchmarks

int main() {
  using namespace lockstep;
  using namespace lockstep::benchmarks;
  std::printf("Forward and backward, fp32; medians of %zu rounds, processor time\n", kRounds);
  std::printf("%-6s %-22s %8s %10s %13s   %s\n", "model", "operation", "threads", "ours, us",
              "libtorch, us", "libtorch / ours [lowest and highest of 3 blocks]");
  for (const ModelSize& size : kSizes)
    for (const int threads : {1, 2}) {
      report(size, norm_rivals(size, Normalization::RMSNorm), threads);
      report(size, norm_rivals(size, Normalization::LayerNorm), threads);
      report(size, swiglu_rivals(size), threads);
      report(size, rotary_rivals(size), threads);
      const int64_t tokens = size.sequence * size.batch;
      report(size, cross_entropy_rivals("cross entropy", tokens, 320, 0), threads);
      report(size, cross_entropy_rivals("smoothed cross entropy", tokens, 320, 0.1), threads);
      report(size, cross_entropy_rivals("cross entropy, 32,000", tokens / 4, 32000, 0), threads);
      report(size, chunked_loss_rivals(size, 32000, 128), threads);
      report(size, grouped_attention_rivals(size), threads);
      report(size, linear_rivals("linear", size, size.ffn, at::kFloat), threads);
      report(size, linear_rivals("linear, bf16", size, size.ffn, at::kBFloat16), threads);
      report(size, linear_rivals("output, 32,000", size, 32000, at::kFloat), threads);
      report(size, linear_rivals("output, 32,000, bf16", size, 32000, at::kBFloat16), threads);
    }
  return 0;
}
