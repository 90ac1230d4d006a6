// Collectives of CPU tensors: ours (slices exchanged between all pairs of ranks) against Gloo's
// through c10d, over the same connections, in one program, round by round. Ranks are threads over
// the loopback interface; a call ends when it has ended on every rank. In a round, each rival makes
// `calls` calls one after another.

#include "lockstep/parallel_state/collectives.h"

#include <barrier>
#include <cstdio>
#include <string>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lockstep/benchmarks/interleaved.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep::benchmarks {
namespace {

constexpr size_t kWarmups = 3, kBlocks = 4;

struct Case {
  const char* operation;  ///< "reduce-scatter", "all-gather", "all-reduce"
  int64_t bytes;          ///< of the whole tensor
  int ranks;
  size_t rounds;
  int calls;
};

struct Rank {
  ProcessGroup group;
  at::Tensor whole, part;
};

void ours(const Case& which, const Rank& rank) {
  const std::string operation = which.operation;
  if (operation == "reduce-scatter")
    reduce_scatter(rank.group, rank.part, rank.whole, ReduceOp::sum, "benchmark").wait();
  else if (operation == "all-gather")
    all_gather(rank.group, rank.whole, rank.part, "benchmark").wait();
  else
    all_reduce(rank.group, rank.whole, ReduceOp::sum, "benchmark").wait();
}

void of_c10d(const Case& which, const Rank& rank) {
  const std::string operation = which.operation;
  c10d::ProcessGroup& group = *rank.group.c10d_group();
  at::Tensor whole = rank.whole, part = rank.part;
  std::vector<at::Tensor> tensors = {whole};
  if (operation == "reduce-scatter")
    group._reduce_scatter_base(part, whole)->wait();
  else if (operation == "all-gather")
    group._allgather_base(whole, part)->wait();
  else
    group.allreduce(tensors)->wait();
}

/// Returns the seconds of ours and of c10d's, one sample per round.
std::vector<Samples> measure_rank(const Case& which, const c10::intrusive_ptr<c10d::Store>& store,
                                  std::barrier<>& meet, int rank_index) {
  at::set_num_threads(1);
  ParallelStateOptions options;
  options.sizes.world_size = which.ranks;
  const ParallelState state(store, rank_index, options);
  const int64_t numel = std::max<int64_t>(which.bytes / 4 / which.ranks, 1) * which.ranks;
  const Rank rank{state.world(), at::zeros({numel}), at::zeros({numel / which.ranks})};
  const auto timed = [&](void (*call)(const Case&, const Rank&)) {
    meet.arrive_and_wait();
    return seconds_of([&] {
      for (int i = 0; i < which.calls; ++i) call(which, rank);
      meet.arrive_and_wait();
    });
  };
  std::vector<Samples> rivals(2);
  for (size_t round = 0; round < which.rounds + kWarmups; ++round) {
    const double mine = timed(ours), theirs = timed(of_c10d);
    if (round < kWarmups) continue;
    rivals[0].push_back(mine / which.calls);
    rivals[1].push_back(theirs / which.calls);
  }
  return rivals;
}

void report(const Case& which) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::barrier<> meet(which.ranks);
  std::vector<std::thread> others;
  for (int rank = 1; rank < which.ranks; ++rank)
    others.emplace_back([&, rank] { measure_rank(which, store, meet, rank); });
  const std::vector<Samples> rivals = measure_rank(which, store, meet, 0);
  for (std::thread& thread : others) thread.join();
  const auto of = [&](size_t rival) {
    return estimate(rivals, kBlocks, [=](const auto& m) { return m[rival] * 1e3; }).value;
  };
  const Estimate ratio = estimate(rivals, kBlocks, [](const auto& m) { return m[1] / m[0]; });
  std::printf("%-15s %10lld %6d %10.3f %10.3f   %5.2f [%.2f, %.2f]\n", which.operation,
              static_cast<long long>(which.bytes), which.ranks, of(0), of(1), ratio.value,
              ratio.low, ratio.high);
}

}  // namespace
}  // namespace lockstep::benchmarks

int main() {
  using namespace lockstep::benchmarks;
  lockstep::prepare_rank_threads();
  std::printf("Median over all rounds; ratio [lowest and highest of %zu blocks]\n\n", kBlocks);
  std::printf("%-15s %10s %6s %10s %10s   %s\n", "", "bytes", "ranks", "ours, ms", "Gloo, ms",
              "Gloo / ours");
  for (const char* operation : {"reduce-scatter", "all-gather", "all-reduce"})
    for (const int ranks : {2, 4})
      for (const int64_t bytes :
           {int64_t{64}, int64_t{1} << 16, int64_t{1} << 20, int64_t{1} << 26})
        report({operation, bytes, ranks, bytes < (1 << 24) ? size_t{40} : size_t{8},
                bytes < (1 << 24) ? 10 : 1});
}
