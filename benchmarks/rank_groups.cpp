// The groups of one rank in a world of 131,072, from the sizes only: looked up (index, length and
// position in each kind of group) and listed (every rank of each of those groups).

#include <cstdint>
#include <cstdio>

#include "lockstep/benchmarks/interleaved.h"
#include "lockstep/parallel_state/rank_grids.h"

namespace lockstep::benchmarks {
namespace {

constexpr size_t kRounds = 50, kBlocks = 5;
constexpr int64_t kRank = 98765;

struct Case {
  const char* name;
  ParallelSizes sizes;
};

/// Returns a sum, so that the compiler cannot drop the work.
int64_t look_up(const ParallelSizes& sizes) {
  const RankGrids grids(sizes);
  int64_t sum = 0;
  for (const GroupKind kind : all_group_kinds()) {
    const RankGroups groups = grids.groups(kind);
    sum += groups.size() + groups.index_of(kRank).value_or(0);
    sum += groups.position_of(kRank).value_or(0);
  }
  return sum;
}

int64_t list(const ParallelSizes& sizes) {
  const RankGrids grids(sizes);
  int64_t sum = 0;
  for (const GroupKind kind : all_group_kinds())
    for (const int64_t rank : grids.group_of(kind, kRank)) sum += rank;
  return sum;
}

void report(const Case& which) {
  std::vector<Samples> samples(2);
  int64_t sum = 0;
  for (size_t round = 0; round < kRounds; ++round) {
    samples[0].push_back(seconds_of([&] { sum += look_up(which.sizes); }));
    samples[1].push_back(seconds_of([&] { sum += list(which.sizes); }));
  }
  std::printf("%s (checksum %lld)\n", which.name, static_cast<long long>(sum));
  const char* const what[] = {"looked up, ms", "listed, ms"};
  for (size_t i = 0; i < samples.size(); ++i) {
    const Estimate e = estimate(samples, kBlocks, [i](const auto& medians) { return medians[i]; });
    std::printf("  %-44s %9.3f   [%.3f, %.3f]\n", what[i], e.value * 1e3, e.low * 1e3,
                e.high * 1e3);
  }
}

}  // namespace
}  // namespace lockstep::benchmarks

int main() {
  using namespace lockstep::benchmarks;
  std::printf(
      "All groups of one rank of 131072. Median over %zu rounds [lowest and highest of %zu "
      "blocks]\n\n",
      kRounds, kBlocks);
  report({"tensor 8, pipeline 16, context 2, expert 8",
          {.world_size = 131072, .tensor = 8, .pipeline = 16, .context = 2, .expert = 8}});
  report({"data parallelism alone", {.world_size = 131072}});
}
