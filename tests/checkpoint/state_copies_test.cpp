#include "lockstep/checkpoint/state_copies.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/copy_loader.h"
#include "lockstep/checkpoint/state_copier.h"
#include "lockstep/checkpoint/state_share.h"
#include "lockstep/core/error.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

using Random = std::mt19937;

constexpr int64_t kShared = 700, kSharded = 400000;  // elements; the second has several blocks

/// The elements in `range` of a tensor after an iteration.
at::Tensor expected_values(int64_t iteration, int64_t tensor, FlatRange range) {
  return at::arange(range.first, range.last, at::kDouble) * 3 + static_cast<double>(tensor) +
         static_cast<double>(iteration) * 1e7;
}

FlatRange range_of(int64_t rank, int64_t ranks) {
  return {kSharded * rank / ranks, kSharded * (rank + 1) / ranks};
}

/// A weight that all ranks hold, and optimizer state that is sharded over them.
std::vector<StateTensor> state_of(int64_t iteration, const ParallelState& state) {
  const FlatRange whole = {0, kShared}, mine = range_of(state.rank(), state.world_size());
  return {{"w", "", {whole_box({kShared}), whole}, expected_values(iteration, 0, whole)},
          {"s", "exp_avg", {whole_box({kSharded}), mine}, expected_values(iteration, 1, mine)}};
}

TrainingProgress progress_of(int64_t iteration, int64_t rank) {
  TrainingProgress progress;
  progress.iteration = iteration;
  progress.consumed_samples = 4 * iteration;
  progress.optimizer.num_steps = iteration - 1;
  progress.metrics_checksum = static_cast<uint32_t>(100 * iteration + rank);
  progress.spikes = {{1.5, 2.5}, {0.5, 0.25}, 8, 3};
  return progress;
}

void copy_state(StateCopier& copier, int64_t iteration, const ParallelState& state) {
  copier.copy(state_of(iteration, state), progress_of(iteration, state.rank()), Config{});
}

/// The collective of an iteration's loss in a run.
void sum_losses(const ParallelState& state) {
  all_reduce(state.world(), at::zeros({3}, at::kDouble), ReduceOp::sum, "loss").wait();
}

constexpr int64_t kMebibyte = 1 << 20;

/// Checks that the ranks together read, on their layout, the state after `iteration`. `mixed`: they
/// read twice, the second time in another order.
void check_loaded(CopyLoader& loader, int64_t iteration, const ParallelState& state,
                  bool mixed = false) {
  ASSERT_TRUE(loader.id()) << iteration;
  const std::vector<StateTensor> targets = state_of(-1, state);
  const std::vector<StateTensor> reversed(targets.rbegin(), targets.rend());
  EXPECT_EQ(loader.read([&](CheckpointReader& checkpoint) {
    load_state(checkpoint, targets);
    if (mixed) load_state(checkpoint, reversed);
  }),
            "");
  const std::vector<StateTensor> wanted = state_of(iteration, state);
  for (size_t i = 0; i < targets.size(); ++i)
    EXPECT_TRUE(at::equal(targets[i].values, wanted[i].values)) << iteration << " " << i;
  const Manifest& found = loader.checkpoint().manifest();
  const TrainingProgress progress = progress_of(iteration, /*rank=*/0);
  EXPECT_EQ(found.iteration, iteration);
  EXPECT_EQ(found.consumed_samples, progress.consumed_samples);
  EXPECT_EQ(found.optimizer_steps, progress.optimizer.num_steps);
  EXPECT_EQ(found.metrics_checksum, progress.metrics_checksum);
  EXPECT_EQ(found.spikes, progress.spikes);
}

/// Bytes that one of 3 ranks sends for each replica: its tensors, padded to 64 bytes, the checksums
/// of blocks of 1 MiB, and 8 bytes.
int64_t bytes_of_rank(int64_t rank) {
  const auto padded = [](int64_t elements) { return (elements * 8 + 63) / 64 * 64; };
  const int64_t sharded = range_of(rank, 3).numel();
  const int64_t file = padded(sharded) + (rank == 0 ? padded(kShared) : 0);
  return file + (file + (1 << 20) - 1) / (1 << 20) * 4 + 8;
}

TEST(StateCopiesTest, ACopySendsTheOwnPartOnceToEachHolderAndNothingElse) {
  for (const int64_t replicas : {1, 2}) {
    testing::CollectiveLog log;
    std::vector<StateCopies> copies(3);
    testing::run_ranks(3,
                       [&](const ParallelState& state) {
                         StateCopier copier(state, copies[static_cast<size_t>(state.rank())],
                                            replicas, 0);
                         for (int64_t i = 1; i <= 4; ++i) {
                           sum_losses(state);
                           copy_state(copier, i, state);
                         }
                       },
                       {.log = &log});
    for (int64_t rank = 0; rank < 3; ++rank) {
      const auto calls = log.of_rank(rank);
      std::vector<int64_t> sent;
      int64_t others = 0;
      for (const CollectiveRecord& call : calls) {
        if (call.label == "loss") continue;
        if (call.label != "a part of the state in memory" || call.operation != "all_to_all") {
          ++others;  // the plan, before the first copy
          EXPECT_EQ(sent.size(), 0u) << call.label;
          continue;
        }
        EXPECT_EQ(call.group, "world");
        sent.push_back(call.bytes);
      }
      EXPECT_EQ(others, 4);  // two texts of two calls each
      EXPECT_EQ(sent, std::vector<int64_t>(static_cast<size_t>(4 * replicas), bytes_of_rank(rank)))
          << rank;
      int64_t kept = bytes_of_rank(rank);
      for (int64_t n = 1; n <= replicas; ++n) kept += bytes_of_rank((rank + 3 - n) % 3);
      EXPECT_EQ(copies[static_cast<size_t>(rank)].bytes(), 2 * kept);
    }
  }
}

/// A world of ranks that come and go, with the copies that each rank keeps.
struct World {
  std::vector<StateCopies> copies;
  std::vector<int64_t> finished;  ///< the last iteration of which each rank has made a copy

  explicit World(int64_t ranks)
      : copies(static_cast<size_t>(ranks)), finished(static_cast<size_t>(ranks), 0) {}

  /// Makes copies of iterations `first` to 6. Each of `victims` ends before its n-th collective.
  void train(int64_t replicas, int64_t round, int64_t first,
             const std::vector<std::pair<int64_t, int64_t>>& victims) {
    std::vector<int64_t> calls(copies.size(), 0);
    testing::RankThreadOptions options;
    options.observer = [&](const CollectiveRecord& call) {
      const int64_t number = ++calls[static_cast<size_t>(call.rank)];
      for (const auto& [rank, at] : victims)
        if (rank == call.rank && number >= at) throw std::runtime_error("is killed");
    };
    testing::errors_of_ranks(
        static_cast<int64_t>(copies.size()),
        [&](const ParallelState& state) {
          const auto rank = static_cast<size_t>(state.rank());
          StateCopier copier(state, copies[rank], replicas, round);
          for (int64_t i = first; i <= 6; ++i) {
            sum_losses(state);
            copy_state(copier, i, state);
            finished[rank] = i;
          }
        },
        options);
  }

  /// The iteration of the newest copy for which the lists of all ranks have every part.
  std::optional<int64_t> newest_held() const {
    std::map<CopyId, std::set<int64_t>> parts;
    std::map<CopyId, HeldCopy> copies_by_id;
    for (const StateCopies& rank : copies)
      for (const HeldCopy& copy : rank.held()) {
        parts[copy.id].insert(copy.parts.begin(), copy.parts.end());
        copies_by_id[copy.id] = copy;
      }
    std::optional<int64_t> newest;
    for (const auto& [id, copy] : copies_by_id)
      if (static_cast<int64_t>(parts[id].size()) == copy.world_size) newest = copy.iteration;
    return newest;
  }

  bool is_empty() const {
    return std::all_of(copies.begin(), copies.end(),
                       [](const StateCopies& rank) { return rank.held().empty(); });
  }

  void lose(const std::set<int64_t>& ranks, bool replaced) {
    std::vector<StateCopies> left;
    for (size_t rank = 0; rank < copies.size(); ++rank)
      if (!ranks.contains(static_cast<int64_t>(rank)))
        left.push_back(std::move(copies[rank]));
      else if (replaced)
        left.emplace_back();
    copies = std::move(left);
  }
};

TEST(StateCopiesTest, RanksThatAreLeftReadTheNewestCopyOnTheirOwnLayout) {
  Random random(1);
  const auto between = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  int found = 0, lost = 0, inside = 0;
  for (int trial = 0; trial < 60; ++trial) {
    const int64_t ranks = between(2, 4), replicas = between(1, ranks - 1);
    const int64_t num_victims = between(1, std::min<int64_t>(2, ranks - 1));
    World world(ranks);
    std::vector<std::pair<int64_t, int64_t>> victims;
    std::set<int64_t> lost_ranks;
    while (static_cast<int64_t>(lost_ranks.size()) < num_victims)
      if (const int64_t rank = between(0, ranks - 1); lost_ranks.insert(rank).second)
        victims.emplace_back(rank, between(6, 10 + 5 * replicas));
    world.train(replicas, 0, 1, victims);
    const int64_t by_all = *std::min_element(world.finished.begin(), world.finished.end());
    inside += by_all != *std::max_element(world.finished.begin(), world.finished.end());
    world.lose(lost_ranks, /*replaced=*/between(0, 1) == 0);
    const std::optional<int64_t> wanted = world.newest_held();
    const int64_t exchange = kMebibyte * between(1, 3);
    const bool mixed = between(0, 1) == 0;
    if (num_victims <= replicas && by_all > 0) {
      EXPECT_GE(wanted.value_or(0), by_all) << trial;
    }
    testing::run_ranks(static_cast<int64_t>(world.copies.size()), [&](const ParallelState& state) {
      StateCopies& copies = world.copies[static_cast<size_t>(state.rank())];
      CopyLoader loader(state, copies, /*least=*/state.rank() == 0 ? 1 : 100, {}, exchange);
      ASSERT_EQ(loader.id().has_value(), wanted.has_value()) << trial;
      EXPECT_EQ(loader.no_copy_reason().empty(), wanted.has_value());
      EXPECT_EQ(loader.no_copy_reason() == "no surviving rank has a copy of the state",
                world.is_empty());
      if (!wanted) return;
      check_loaded(loader, *wanted, state, mixed);
      copies.keep_only(*loader.id());
    });
    (wanted ? found : lost) += 1;
  }
  EXPECT_GT(found, 30);
  EXPECT_GT(lost, 3);
  EXPECT_GT(inside, 0);
}

TEST(StateCopiesTest, AfterALossTheNextOneFindsTheOldCopyOrTheNew) {
  for (const int64_t at : {1, 5, 6, 7, 8, 9, 30}) {  // calls of the second round
    World world(3);
    world.train(1, 0, 1, {{2, 14}});
    world.lose({2}, /*replaced=*/false);
    const int64_t before = *world.newest_held();
    for (StateCopies& copies : world.copies) copies.keep_only({0, before - 1});
    std::fill(world.finished.begin(), world.finished.end(), 0);
    world.train(1, 1, before, {{0, at}});
    const int64_t by_all = *std::min_element(world.finished.begin(), world.finished.begin() + 2);
    world.lose({0}, /*replaced=*/true);
    const std::optional<int64_t> wanted = world.newest_held();
    EXPECT_TRUE(wanted || by_all == 0) << at;
    if (!wanted) continue;  // only rank 0 had a copy of part 2
    EXPECT_GE(*wanted, std::max(before, by_all)) << at;
    testing::run_ranks(2, [&](const ParallelState& state) {
      CopyLoader loader(state, world.copies[static_cast<size_t>(state.rank())], 1);
      check_loaded(loader, *wanted, state);
    });
  }
}

TEST(StateCopiesTest, CopiesFromBeforeTheCheckpointOnDiskDoNotCount) {
  World world(2);
  world.train(1, 0, 1, {});
  testing::run_ranks(2, [&](const ParallelState& state) {
    const StateCopies& copies = world.copies[static_cast<size_t>(state.rank())];
    EXPECT_TRUE(CopyLoader(state, copies, 6).id());
    const CopyLoader none(state, copies, 7);
    EXPECT_FALSE(none.id());
    EXPECT_EQ(none.no_copy_reason(), "");
  });
}

/// A new rank reads while it receives, so it does not hold everything twice.
TEST(StateCopiesTest, WhatARankLacksIsSentPieceByPiece) {
  World world(2);
  world.train(1, 0, 1, {});
  world.lose({1}, /*replaced=*/true);
  constexpr int64_t kQuarters = 4;
  std::vector<StateTensor> targets;
  for (int64_t i = 0; i < kQuarters; ++i) {
    const FlatRange range = range_of(i, kQuarters);
    targets.push_back(
        {"s", "exp_avg", {whole_box({kSharded}), range}, expected_values(-1, 1, range)});
  }
  const auto is_read = [&](const StateTensor& one) {
    return at::equal(one.values, expected_values(6, 1, one.part.range));
  };
  std::vector<int64_t> read_before_exchange;
  testing::CollectiveLog log;
  testing::RankThreadOptions options = {.log = &log};
  options.observer = [&](const CollectiveRecord& call) {
    if (call.label == "blocks in memory" && call.rank == 1)
      read_before_exchange.push_back(std::count_if(targets.begin(), targets.end(), is_read));
  };
  testing::run_ranks(
      2,
      [&](const ParallelState& state) {
        CopyLoader loader(state, world.copies[static_cast<size_t>(state.rank())], 1, {}, kMebibyte);
        EXPECT_EQ(loader.read([&](CheckpointReader& checkpoint) {
          if (state.rank() == 1) load_state(checkpoint, targets);
        }),
                  "");
      },
      options);
  EXPECT_TRUE(std::all_of(targets.begin(), targets.end(), is_read));
  EXPECT_EQ(read_before_exchange, std::vector<int64_t>({0, 1, 2, 3}));
  for (const CollectiveRecord& call : log.of_rank(0))
    if (call.label == "blocks in memory") {
      EXPECT_LE(call.bytes, kMebibyte);
    }
}

TEST(StateCopiesTest, ALostPartAndADamagedOneAreNamed) {
  World world(3);
  world.train(1, 0, 1, {});
  const StateCopy* const copy = world.copies[2].find({0, 5});
  static_cast<char*>(copy->parts.at(1).bytes.data_ptr())[1 << 20] ^= 4;
  world.copies[1].clear();
  testing::run_ranks(3, [&](const ParallelState& state) {
    CopyLoader loader(state, world.copies[static_cast<size_t>(state.rank())], 1, {}, kMebibyte);
    const std::vector<StateTensor> targets = state_of(-1, state);
    const std::string failure =
        loader.read([&](CheckpointReader& checkpoint) { load_state(checkpoint, targets); });
    EXPECT_EQ(failure,
              "rank 1: 'the ranks' memory/part_1': tensor 'optimizer.exp_avg.s': bytes 1048576 to "
              "1066687 do not match the checksum in the manifest");
  });
  world.copies[2].clear();
  testing::run_ranks(3, [&](const ParallelState& state) {
    const CopyLoader loader(state, world.copies[static_cast<size_t>(state.rank())], 1);
    EXPECT_EQ(loader.no_copy_reason(),
              "the copy of iteration 5 is incomplete: no surviving rank has the part of rank 1");
  });
}

}  // namespace
}  // namespace lockstep
