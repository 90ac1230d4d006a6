// Causal attention, forward and backward, over a sequence that is split across ranks, against one
// rank that holds all of it; round by round, ranks as threads with one core each. Efficiency is the
// time of one rank over (ranks times the time of the ranks). The exposed communication is the
// difference to ranks of the same layout whose collectives return at once.

#include <array>
#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/benchmarks/interleaved.h"
#include "lockstep/models/context_parallel.h"

namespace lockstep::benchmarks {
namespace {

constexpr size_t kWarmups = 1, kRounds = 9, kBlocks = 3;
constexpr int64_t kHeads = 2, kChannels = 64;

struct Rank {
  ContextParallel context;
  std::vector<at::Tensor> qkv;

  Rank(const ParallelState& state, ContextCommunication communication, int64_t length)
      : context(ContextParallel::of(state, communication)) {
    for (int i = 0; i < 3; ++i)
      qkv.push_back(
          at::randn({length / context.group.size(), 1, kHeads, kChannels}).requires_grad_(true));
  }

  void run() const { context_attention(qkv[0], qkv[1], qkv[2], context).sum().backward(); }
};

constexpr std::array kModes = {ContextCommunication::p2p, ContextCommunication::all_gather,
                               ContextCommunication::a2a};

/// Describes what a mode sends, in forward and backward.
const char* communication_of(ContextCommunication mode) {
  if (mode == ContextCommunication::p2p)
    return "keys and values round the ring, twice, and their gradients once";
  if (mode == ContextCommunication::all_gather)
    return "all-gather of keys and values, reduce-scatter of their gradients";
  return "all-to-all of queries, keys and values, and of the output, twice";
}

/// Seconds per round: one rank, then for each mode the ranks with and without communication.
std::vector<Samples> measure_rank(const c10::intrusive_ptr<c10d::Store>& store,
                                  std::barrier<>& meet, int64_t index, int64_t ranks,
                                  int64_t length) {
  at::set_num_threads(1);
  ParallelStateOptions options;
  options.sizes = {.world_size = ranks, .context = ranks};
  const ParallelState state(store, index, options);
  const Rank one(ParallelState::single_process(), ContextCommunication::p2p, length);
  std::vector<Rank> together, alone;
  for (const auto mode : kModes) {
    together.emplace_back(state, mode, length);
    alone.emplace_back(ParallelState::planning_rank(options.sizes, index), mode, length);
  }
  const auto timed = [&](const Rank& rank, bool takes_part) {
    meet.arrive_and_wait();
    return seconds_of([&] {
      if (takes_part) rank.run();
      meet.arrive_and_wait();
    });
  };
  std::vector<Samples> rivals(1 + 2 * kModes.size());
  for (size_t round = 0; round < kRounds + kWarmups; ++round) {
    std::vector<double> seconds = {timed(one, index == 0)};
    for (size_t mode = 0; mode < kModes.size(); ++mode) {
      seconds.push_back(timed(together[mode], true));
      seconds.push_back(timed(alone[mode], true));
    }
    for (size_t i = 0; i < seconds.size() && round >= kWarmups; ++i)
      rivals[i].push_back(seconds[i]);
  }
  return rivals;
}

void report(int64_t ranks, int64_t length) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::barrier<> meet(ranks);
  std::vector<std::thread> others;
  for (int64_t rank = 1; rank < ranks; ++rank)
    others.emplace_back([&, rank] { measure_rank(store, meet, rank, ranks, length); });
  const std::vector<Samples> rivals = measure_rank(store, meet, 0, ranks, length);
  for (std::thread& thread : others) thread.join();
  for (size_t mode = 0; mode < kModes.size(); ++mode) {
    const size_t at = 1 + 2 * mode;
    const Estimate efficiency = estimate(
        rivals, kBlocks, [=](const auto& m) { return m[0] / m[at] / static_cast<double>(ranks); });
    const Estimate exposed =
        estimate(rivals, kBlocks, [=](const auto& m) { return (m[at] - m[at + 1]) * 1e3; });
    std::printf("%5lld %-10s %10.1f %10.1f   %.2f [%.2f, %.2f]   %6.1f [%.1f, %.1f] of %s\n",
                static_cast<long long>(ranks), to_string(kModes[mode]), median(rivals[0]) * 1e3,
                median(rivals[at]) * 1e3, efficiency.value, efficiency.low, efficiency.high,
                exposed.value, exposed.low, exposed.high, communication_of(kModes[mode]));
  }
}

}  // namespace
}  // namespace lockstep::benchmarks

int main(int argc, char** argv) {
  using namespace lockstep::benchmarks;
  lockstep::prepare_rank_threads();
  const int64_t length = argc > 1 ? std::atoll(argv[1]) : 8192;
  const int64_t ranks = argc > 2 ? std::atoll(argv[2]) : 2;
  std::printf(
      "Sequence %lld, %lld heads of %lld, fp32; medians [lowest and highest of %zu blocks]\n",
      static_cast<long long>(length), static_cast<long long>(kHeads),
      static_cast<long long>(kChannels), kBlocks);
  std::printf("%5s %-10s %10s %10s   %-17s   %s\n", "ranks", "mode", "one, ms", "ranks, ms",
              "efficiency", "exposed, ms, of which communication");
  report(ranks, length);
}
