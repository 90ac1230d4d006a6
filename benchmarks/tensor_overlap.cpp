// A column-parallel layer, SwiGLU and a row-parallel layer, forward only and with backward, without
// and with tp_comm_overlap. Round by round, ranks as threads with one core each. Every mode also
// runs on ranks whose collectives return at once: the difference to them is the communication that
// is not hidden by matrix products.

#include <array>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/benchmarks/interleaved.h"
#include "lockstep/models/linear.h"

namespace lockstep::benchmarks {
namespace {

constexpr size_t kWarmups = 2, kRounds = 30, kBlocks = 3;

struct Sizes {
  int64_t positions, width, ranks;
};

class FeedForward {
 public:
  FeedForward(const ParallelState& state, const Sizes& sizes, bool sequence, bool overlap)
      : context_{.state = state, .sequence_parallel = sequence, .tp_comm_overlap = overlap},
        up_(context_.child("up"), sizes.width, {2, 4 * sizes.width}, false, 0.02),
        down_(context_.child("down"), 4 * sizes.width, sizes.width, false, 0.02),
        x_(at::randn({sizes.positions / (sequence ? sizes.ranks : 1), 1, sizes.width})) {
    x_.requires_grad_(true);
  }

  void run(bool backward) const {
    const at::AutoGradMode mode(backward);
    const std::vector<at::Tensor> halves = up_.forward(x_).chunk(2, -1);
    const at::Tensor y = down_.forward(at::silu(halves[0]) * halves[1]);
    if (backward) y.sum().backward();
  }

 private:
  ParallelContext context_;
  ColumnParallelLinear up_;
  RowParallelLinear down_;
  at::Tensor x_;
};

struct Mode {
  bool sequence, overlap, backward;
};
constexpr std::array kModes = {Mode{true, false, false},  Mode{true, true, false},
                               Mode{true, false, true},   Mode{true, true, true},
                               Mode{false, false, false}, Mode{false, true, false},
                               Mode{false, false, true},  Mode{false, true, true}};

/// Seconds per round, for each mode: the ranks with and without communication.
std::vector<Samples> measure_rank(const c10::intrusive_ptr<c10d::Store>& store,
                                  std::barrier<>& meet, int64_t index, const Sizes& sizes) {
  at::set_num_threads(1);
  ParallelStateOptions options;
  options.sizes = {.world_size = sizes.ranks, .tensor = sizes.ranks};
  const ParallelState state(store, index, options);
  const ParallelState alone = ParallelState::planning_rank(options.sizes, index);
  std::vector<Samples> rivals(2 * kModes.size());
  std::vector<FeedForward> layers;
  for (const Mode& mode : kModes)
    for (const ParallelState& of : {state, alone})
      layers.emplace_back(of, sizes, mode.sequence, mode.overlap);
  for (size_t round = 0; round < kRounds + kWarmups; ++round)
    for (size_t i = 0; i < layers.size(); ++i) {
      meet.arrive_and_wait();
      const double seconds = seconds_of([&] {
        layers[i].run(kModes.at(i / 2).backward);
        meet.arrive_and_wait();
      });
      if (round >= kWarmups) rivals[i].push_back(seconds);
    }
  return rivals;
}

void report(const Sizes& sizes) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::barrier<> meet(sizes.ranks);
  std::vector<std::thread> others;
  for (int64_t rank = 1; rank < sizes.ranks; ++rank)
    others.emplace_back([&, rank] { measure_rank(store, meet, rank, sizes); });
  const std::vector<Samples> rivals = measure_rank(store, meet, 0, sizes);
  for (std::thread& thread : others) thread.join();
  for (size_t i = 0; i < kModes.size(); i += 2) {
    const size_t plain = 2 * i, overlapped = plain + 2;
    const Estimate ratio =
        estimate(rivals, kBlocks, [=](const auto& m) { return m[overlapped] / m[plain]; });
    const Mode& mode = kModes.at(i);
    std::printf("%-20s %-20s %8.2f %8.2f   %.2f [%.2f, %.2f] %8.2f %8.2f\n",
                mode.sequence ? "sequence parallel" : "not",
                mode.backward ? "and backward" : "forward", median(rivals[plain]) * 1e3,
                median(rivals[overlapped]) * 1e3, ratio.value, ratio.low, ratio.high,
                median(rivals[plain + 1]) * 1e3, median(rivals[overlapped + 1]) * 1e3);
  }
}

}  // namespace
}  // namespace lockstep::benchmarks

int main(int argc, char** argv) {
  using namespace lockstep::benchmarks;
  lockstep::prepare_rank_threads();
  const auto number = [&](int i, int64_t otherwise) {
    return argc > i ? std::atoll(argv[i]) : otherwise;
  };
  const Sizes sizes = {number(1, 1024), number(2, 512), number(3, 2)};
  std::printf(
      "%lld positions, width %lld, %lld ranks, fp32; medians of %zu rounds, ms [ratios of "
      "%zu blocks]\n%-20s %-20s %8s %8s   %-17s %8s %8s\n",
      static_cast<long long>(sizes.positions), static_cast<long long>(sizes.width),
      static_cast<long long>(sizes.ranks), kRounds, kBlocks, "layout", "pass", "plain", "parts",
      "parts / plain", "plain, no", "communication");
  report(sizes);
}
