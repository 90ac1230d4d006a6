// Fused operations of layers, forward and backward, against the equivalent libtorch operators, in
// fp32 unless the name says otherwise, round by round. Prints the processor time of the process,
// which other programs disturb least, beside that of an autograd function that computes nothing,
// and the ratio of elapsed times, which matters with several threads. Then prints the bytes per
// second that they must read and write: on larger tensors, as a share of those of `c = a + b` and
// of bare loops over the same numbers of tensors, and on tensors that stay in caches, where only
// arithmetic and dispatch limit them. `gpu_bench fused` measures the operations on a GPU.
//
//   fused_ops [NAME]    the operations whose name contains NAME; without it all

#include <malloc.h>

#include <chrono>
#include <cstdio>
#include <ctime>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "lockstep/benchmarks/bare_loops.h"
#include "lockstep/benchmarks/fused_rivals.h"
#include "lockstep/benchmarks/interleaved.h"

namespace lockstep::benchmarks {
namespace {

using Tensors = std::vector<at::Tensor>;

constexpr size_t kWarmups = 5, kRounds = 60, kBlocks = 3, kLargeRounds = 12;
constexpr double kShareLimit = 0.85;

// Its tensors have up to 28 MiB: malloc never keeps blocks of more than 32 MiB.
const ModelSize kLarge = {"large", 512, 8, 1792, 832, 16};
const ModelSize kCached = {"cached", 128, 2, 896, 832, 8};  // up to 0.9 MiB
const ModelSize kSizes[] = {
    {"tiny", 128, 8, 128, 384, 4}, {"small", 256, 4, 384, 1024, 6}, {"many", 64, 4, 64, 192, 4}};

struct Seconds {
  double processor, elapsed;
};

Seconds times_of(const Rival& rival, const Tensors& grads) {
  using Clock = std::chrono::steady_clock;
  const std::clock_t processor = std::clock();
  const Clock::time_point begin = Clock::now();
  rival.run(grads);
  return {static_cast<double>(std::clock() - processor) / CLOCKS_PER_SEC,
          std::chrono::duration<double>(Clock::now() - begin).count()};
}

/// Returns libtorch's time over ours.
Estimate ratio_of(const std::vector<Samples>& samples) {
  return estimate(samples, kBlocks, [](const auto& m) { return m[1] / m[0]; });
}

void report(const ModelSize& size, const Rivals& rivals, int threads) {
  at::set_num_threads(threads);
  const Tensors grads = random_grads(rivals.ours);
  std::vector<Rival> all = {rivals.ours, rivals.libtorch};
  if (!rivals.ours.inputs.empty()) all.push_back(nothing_like(rivals.ours));
  std::vector<Samples> samples(all.size()), elapsed(all.size());
  for (size_t round = 0; round < kRounds + kWarmups; ++round)
    for (size_t rival = 0; rival < all.size(); ++rival) {
      const Seconds seconds = times_of(all[rival], grads);
      if (round < kWarmups) continue;
      samples[rival].push_back(seconds.processor);
      elapsed[rival].push_back(seconds.elapsed);
    }
  const Estimate ratio = ratio_of(samples), of_elapsed = ratio_of(elapsed);
  const double nothing = samples.size() > 2 ? median(samples[2]) : 0;
  std::printf("%-6s %-22s %8d %10.0f %13.0f %13.0f   %.2f [%.2f, %.2f]   %.2f [%.2f, %.2f]\n",
              size.name.c_str(), rivals.name.c_str(), threads, median(samples[0]) * 1e6,
              median(samples[1]) * 1e6, nothing * 1e6, ratio.value, ratio.low, ratio.high,
              of_elapsed.value, of_elapsed.low, of_elapsed.high);
}

double gigabytes(int64_t bytes, double seconds) {
  return static_cast<double>(bytes) / seconds / 1e9;
}

/// Returns the GB/s of ours, on tensors that stay in caches.
double cached_gigabytes(const Rivals& rivals) {
  const Tensors grads = random_grads(rivals.ours);
  Samples samples;
  for (size_t round = 0; round < kRounds + kWarmups; ++round) {
    const double seconds = times_of(rivals.ours, grads).elapsed;
    if (round >= kWarmups) samples.push_back(seconds);
  }
  return gigabytes(rivals.least_bytes(), median(samples));
}

/// Prints the bytes per second of `rivals` in elapsed time, next to those of `c = a + b` and of
/// bare loops.
void report_bandwidth(const Rivals& rivals, const Rivals& cached, int threads) {
  at::set_num_threads(threads);
  const Tensors grads = random_grads(rivals.ours);
  const at::Tensor a = at::zeros({7 << 20}), b = at::ones_like(a);
  at::Tensor c = at::empty_like(a);
  const BareLoops bare(rivals.passes);
  const int64_t bytes = rivals.least_bytes(), plain = 3 * static_cast<int64_t>(a.nbytes());
  std::vector<Samples> samples(4);
  for (size_t round = 0; round < kLargeRounds + kWarmups; ++round) {
    const double ours = times_of(rivals.ours, grads).elapsed;
    const double libtorch = times_of(rivals.libtorch, grads).elapsed;
    const double add = seconds_of([&] { at::add_out(c, a, b); });
    const double of_loops = seconds_of([&] { bare.run(); });
    if (round < kWarmups) continue;
    samples[0].push_back(ours);
    samples[1].push_back(libtorch);
    samples[2].push_back(add);
    samples[3].push_back(of_loops);
  }
  const Estimate share = estimate(samples, kBlocks, [&](const auto& m) {
    return gigabytes(bytes, m[0]) / gigabytes(plain, m[2]);
  });
  const Estimate of_bare = estimate(samples, kBlocks, [](const auto& m) { return m[3] / m[0]; });
  const auto verdict = [](const Estimate& found) {
    return found.value >= kShareLimit ? "met" : "missed";
  };
  std::printf(
      "%-22s %8d %6.1f %9.1f %10.1f %6.1f   %.2f [%.2f, %.2f], %-6s   %.2f [%.2f, %.2f], %-6s "
      "%9.1f\n",
      rivals.name.c_str(), threads, gigabytes(bytes, median(samples[0])),
      gigabytes(bytes, median(samples[1])), gigabytes(plain, median(samples[2])),
      gigabytes(bytes, median(samples[3])), share.value, share.low, share.high, verdict(share),
      of_bare.value, of_bare.low, of_bare.high, verdict(of_bare), cached_gigabytes(cached));
}

/// Returns the memory-bound operations. `rows` is the number of rows of the logits.
std::vector<Rivals> bandwidth_rivals(const ModelSize& size, int64_t rows) {
  std::vector<Rivals> all = layer_rivals(size, at::kFloat);
  all.push_back(cross_entropy_rivals("cross entropy, 32,000", rows, 32000, 0, at::kFloat));
  std::erase_if(all, [](const Rivals& rivals) { return rivals.passes.empty(); });
  return all;
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
  // Fresh memory in each round would cost both sides more than the measured work.
  ::mallopt(M_MMAP_THRESHOLD, 32 << 20);
  ::mallopt(M_TRIM_THRESHOLD, 1 << 30);
  const auto chosen = [&](const Rivals& rivals) {
    return argc < 2 || rivals.name.find(argv[1]) != std::string::npos;
  };
  std::printf("Forward and backward, fp32; medians of %zu rounds, processor time\n", kRounds);
  std::printf("%-6s %-22s %8s %10s %13s %13s   %s\n", "model", "operation", "threads", "ours, us",
              "libtorch, us", "nothing, us",
              "libtorch / ours [lowest and highest of 3 blocks], and of elapsed time");
  for (const ModelSize& size : kSizes)
    for (const int threads : {1, 2})
      for (const Rivals& rivals : all_rivals(size))
        if (chosen(rivals)) report(size, rivals, threads);
  std::printf(
      "\nGB/s\n%-22s %8s %6s %9s %10s %6s   ours / c = a + b, limit %.2f   ours / bare loops"
      "           in caches\n",
      "operation", "threads", "ours", "libtorch", "c = a + b", "loops", kShareLimit);
  for (const int threads : {1, 2}) {
    const auto large = bandwidth_rivals(kLarge, 224), cached = bandwidth_rivals(kCached, 7);
    for (size_t i = 0; i < large.size(); ++i)
      if (chosen(large[i])) report_bandwidth(large[i], cached[i], threads);
  }
  return 0;
}
