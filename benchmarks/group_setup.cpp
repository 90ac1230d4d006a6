// How long the ranks of a world take to meet and to connect all their groups: ranks as threads of
// one process, over Gloo on loopback.
// Usage: group_setup [RANKS] [ROUNDS]; RANKS is a multiple of 8.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/parallel_state/parallel_state.h"

namespace {

using lockstep::GroupKind;
using lockstep::ParallelState;
using Clock = std::chrono::steady_clock;

struct Times {
  double meet = 0;
  double connect = 0;
  size_t groups = 0;  ///< groups of rank 0 that have a communicator
};

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

Times measure(int64_t world) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Times> times(static_cast<size_t>(world));
  const auto rank_main = [&](int64_t rank) {
    at::set_num_threads(1);
    lockstep::ParallelStateOptions options;
    options.sizes = {.world_size = world, .tensor = 2, .pipeline = 2, .expert = 2};
    options.create_all_gather_groups = true;
    const auto start = Clock::now();
    const ParallelState state(store, rank, options);
    Times& mine = times[static_cast<size_t>(rank)];
    mine.meet = milliseconds_since(start);
    std::vector<const void*> communicators;
    for (const GroupKind kind : lockstep::all_group_kinds())
      if (state.grids().group_of(kind, rank).size() > 1)
        communicators.push_back(state.group(kind).c10d_group());
    communicators.push_back(state.world().c10d_group());
    communicators.push_back(state.all_gather_group(GroupKind::dp_cp).c10d_group());
    mine.connect = milliseconds_since(start) - mine.meet;
    std::sort(communicators.begin(), communicators.end());
    mine.groups = static_cast<size_t>(std::unique(communicators.begin(), communicators.end()) -
                                      communicators.begin());
  };
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < world; ++rank) threads.emplace_back(rank_main, rank);
  for (std::thread& thread : threads) thread.join();
  Times slowest = times[0];
  for (const Times& t : times) {
    slowest.meet = std::max(slowest.meet, t.meet);
    slowest.connect = std::max(slowest.connect, t.connect);
  }
  return slowest;
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t world = argc > 1 ? std::atoll(argv[1]) : 8;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 5;
  lockstep::prepare_rank_threads();
  for (int round = 0; round < rounds; ++round) {
    const Times times = measure(world);
    std::printf(
        "%lld ranks: meet %.1f ms, connect %zu communicators of rank 0 and those of the "
        "others %.1f ms\n",
        static_cast<long long>(world), times.meet, times.groups, times.connect);
  }
}
