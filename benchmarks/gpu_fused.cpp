#include <ATen/ATen.h>

#include "lockstep/benchmarks/fused_rivals.h"
#include "lockstep/benchmarks/gpu_bench.h"
#include "lockstep/benchmarks/interleaved.h"

namespace lockstep::benchmarks {
namespace {

constexpr size_t kRounds = 6, kBlocks = 3;
constexpr int kCalls = 5;

/// Measures the milliseconds of forward and backward, ours and libtorch's, round by round.
Json measured(c10::Device device, const Rivals& rivals) {
  const std::vector<at::Tensor> grads = random_grads(rivals.ours);
  std::vector<Samples> samples(2);
  const auto seconds = [&](const Rival& rival) {
    return mean_seconds(device, kCalls, [&] { rival.run(grads); });
  };
  for (size_t round = 0; round < kRounds; ++round) {
    samples[0].push_back(seconds(rivals.ours));
    samples[1].push_back(seconds(rivals.libtorch));
  }
  const Estimate ratio = estimate(samples, kBlocks, [](const auto& m) { return m[1] / m[0]; });
  return {{"ms", median(samples[0]) * 1e3},
          {"libtorch_ms", median(samples[1]) * 1e3},
          {"libtorch_over_ours", ratio.value},
          {"lowest", ratio.low},
          {"highest", ratio.high}};
}

}  // namespace

Json measure_fused(c10::Device device, bool small) {
  const ModelSize size =
      small ? ModelSize{"trial", 32, 2, 64, 128, 4} : ModelSize{"1.3B", 2048, 4, 2048, 5504, 16};
  const int64_t vocabulary = small ? 512 : 50304;
  const auto bf16 = at::TensorOptions(device).dtype(at::kBFloat16);
  Json result = Json::object();
  const auto add = [&](const Rivals& rivals) { result[rivals.name] = measured(device, rivals); };
  for (const Rivals& rivals : layer_rivals(size, bf16)) add(rivals);
  add(cross_entropy_rivals("cross entropy", size.tokens(), vocabulary, 0, bf16));
  add(chunked_loss_rivals(size, vocabulary, size.tokens() / 8, bf16));
  add(linear_rivals("gate and up", size, 2 * size.ffn, bf16));
  add(linear_rivals("output", size, vocabulary, bf16));
  return result;
}

}  // namespace lockstep::benchmarks
