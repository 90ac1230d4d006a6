// Fused operations of layers, forward and backward, against the operators of libtorch that give the
// same, in fp32, round by round. Processor time of the process, which other programs disturb least.

#include <cstdio>
#include <cstdlib>
#include <ctime>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include "lockstep/benchmarks/interleaved.h"
#include "lockstep/models/activation.h"
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

double processor_seconds(const std::function<Tensors()>& forward, const Tensors& grads) {
  const std::clock_t begin = std::clock();
  torch::autograd::backward(forward(), grads);
  return static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
}

void report(const ModelSize& size, const Rivals& rivals, int threads) {
  at::set_num_threads(threads);
  Tensors grads;
  for (const at::Tensor& output : rivals.ours()) grads.push_back(at::randn(output.sizes()));
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
    }
  return 0;
}
