// Fused operations of layers, forward and backward, against the operators of libtorch that give the
// same, in fp32 unless the name says otherwise, round by round. Processor time of the process,
// which other programs disturb least, and the ratio of elapsed times beside it, which counts with
// several threads. `gpu_bench fused` measures the same on a GPU.
//
//   fused_ops [NAME]    the operations whose name contains NAME; without it all

#include <chrono>
#include <cstdio>
#include <ctime>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/autograd.h>

#include "lockstep/benchmarks/fused_rivals.h"
#include "lockstep/benchmarks/interleaved.h"

namespace lockstep::benchmarks {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr size_t kWarmups = 5, kRounds = 60, kBlocks = 3;

const ModelSize kSizes[] = {{"tiny", 128, 8, 128, 384, 4}, {"small", 256, 4, 384, 1024, 6}};

struct Seconds {
  double processor, elapsed;
};

Seconds times_of(const std::function<Tensors()>& forward, const Tensors& grads) {
  using Clock = std::chrono::steady_clock;
  const std::clock_t processor = std::clock();
  const Clock::time_point begin = Clock::now();
  torch::autograd::backward(forward(), grads);
  return {static_cast<double>(std::clock() - processor) / CLOCKS_PER_SEC,
          std::chrono::duration<double>(Clock::now() - begin).count()};
}

/// libtorch's time over ours.
Estimate ratio_of(const std::vector<Samples>& samples) {
  return estimate(samples, kBlocks, [](const auto& m) { return m[1] / m[0]; });
}

void report(const ModelSize& size, const Rivals& rivals, int threads) {
  at::set_num_threads(threads);
  const Tensors grads = random_grads(rivals.ours);
  std::vector<Samples> samples(2), elapsed(2);
  for (size_t round = 0; round < kRounds + kWarmups; ++round)
    for (size_t rival = 0; rival < 2; ++rival) {
      const Seconds seconds = times_of(rival == 0 ? rivals.ours : rivals.libtorch, grads);
      if (round < kWarmups) continue;
      samples[rival].push_back(seconds.processor);
      elapsed[rival].push_back(seconds.elapsed);
    }
  const Estimate ratio = ratio_of(samples), of_elapsed = ratio_of(elapsed);
  std::printf("%-6s %-22s %8d %10.0f %13.0f   %.2f [%.2f, %.2f]   %.2f [%.2f, %.2f]\n",
              size.name.c_str(), rivals.name.c_str(), threads, median(samples[0]) * 1e6,
              median(samples[1]) * 1e6, ratio.value, ratio.low, ratio.high, of_elapsed.value,
              of_elapsed.low, of_elapsed.high);
}

std::vector<Rivals> all_rivals(const ModelSize& size) {
  const at::TensorOptions fp32 = at::kFloat, bf16 = at::kBFloat16;
  std::vector<Rivals> all = layer_rivals(size, fp32);
  all.push_back(cross_entropy_rivals("cross entropy", size.tokens(), 320, 0, fp32));
  all.push_back(cross_entropy_rivals("smoothed cross entropy", size.tokens(), 320, 0.1, fp32));
  all.push_back(cross_entropy_rivals("cross entropy, 32,000", size.tokens() / 4, 32000, 0, fp32));
  all.push_back(chunked_loss_rivals(size, 32000, 128, fp32));
  all.push_back(linear_rivals("linear", size, size.ffn, fp32));
  all.push_back(linear_rivals("linear, bf16", size, size.ffn, bf16));
  all.push_back(linear_rivals("output, 32,000", size, 32000, fp32));
  all.push_back(linear_rivals("output, 32,000, bf16", size, 32000, bf16));
  return all;
}

}  // namespace
}  // namespace lockstep::benchmarks

int main(int argc, char** argv) {
  using namespace lockstep::benchmarks;
  std::printf("Forward and backward, fp32; medians of %zu rounds, processor time\n", kRounds);
  std::printf("%-6s %-22s %8s %10s %13s   %s\n", "model", "operation", "threads", "ours, us",
              "libtorch, us",
              "libtorch / ours [lowest and highest of 3 blocks], and of elapsed time");
  for (const ModelSize& size : kSizes)
    for (const int threads : {1, 2})
      for (const Rivals& rivals : all_rivals(size))
        if (argc < 2 || rivals.name.find(argv[1]) != std::string::npos)
          report(size, rivals, threads);
  return 0;
}
