// Random jobs: the properties of each kind of group, checked here by brute force.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/rank_grids.h"

namespace lockstep {
namespace {

using enum GroupKind;
using Axes = std::vector<std::string>;

constexpr int kRandomGrids = 10000;

Axes split(const std::string& order) {
  Axes axes(1);
  for (const char c : order) c == '-' ? void(axes.emplace_back()) : axes.back().push_back(c);
  return axes;
}

struct Job {
  ParallelSizes sizes;
  std::map<std::string, int64_t> dense, expert;

  /// Groups along the axes of `token`: ranks whose other coordinates are equal, found by checking
  /// every rank. The ranks ascend, and so do the first ranks of the groups.
  std::vector<RankList> groups(bool experts, const std::string& token) const {
    const Axes marked = split(token);
    std::vector<std::pair<int64_t, bool>> axes;  // sizes in order, and whether marked
    for (const std::string& axis : split(sizes.order))
      axes.emplace_back((experts ? expert : dense).at(axis),
                        std::find(marked.begin(), marked.end(), axis) != marked.end());
    std::vector<std::optional<size_t>> known(static_cast<size_t>(sizes.world_size));
    std::vector<RankList> result;
    for (int64_t rank = 0; rank < sizes.world_size; ++rank) {
      int64_t others = 0, rest = rank;
      for (const auto& [size, is_marked] : axes) {
        if (!is_marked) others = others * size + rest % size;
        rest /= size;
      }
      auto& index = known[static_cast<size_t>(others)];
      if (!index) {
        index = result.size();
        result.emplace_back();
      }
      result[*index].push_back(rank);
    }
    return result;
  }
};

int64_t random_divisor(std::mt19937& random, int64_t number) {
  std::vector<int64_t> divisors;
  for (int64_t d = 1; d <= number; ++d)
    if (number % d == 0) divisors.push_back(d);
  return divisors[random() % divisors.size()];
}

Job random_job(std::mt19937& random) {
  const auto size = [&] { return static_cast<int64_t>(1 + random() % 3); };
  const int64_t tp = size(), cp = size(), pp = size(), dp = size() * (1 + random() % 2);
  const int64_t plane = tp * cp * dp, etp = random_divisor(random, plane);
  const int64_t ep = random_divisor(random, plane / etp), edp = plane / etp / ep;
  std::vector<std::string> axes = {"tp", "cp", "ep", "dp", "pp"};
  std::shuffle(axes.begin(), random() % 2 ? axes.end() : axes.end() - 1, random);
  Job job;
  job.dense = {{"tp", tp}, {"cp", cp}, {"ep", 1}, {"dp", dp}, {"pp", pp}};
  job.expert = {{"tp", etp}, {"cp", 1}, {"ep", ep}, {"dp", edp}, {"pp", pp}};
  job.sizes = {.world_size = plane * pp,
               .tensor = tp,
               .pipeline = pp,
               .context = cp,
               .expert = ep,
               .expert_tensor = etp,
               .order = axes[0] + "-" + axes[1] + "-" + axes[2] + "-" + axes[3] + "-" + axes[4],
               .optimizer_instances = random_divisor(random, std::gcd(dp * cp, edp))};
  return job;
}

/// A random job whose grids have the same pipelines. Checks that all others are refused.
std::pair<Job, RankGrids> random_legal(std::mt19937& random) {
  for (;;) {
    const Job job = random_job(random);
    const bool legal = job.groups(false, "pp") == job.groups(true, "pp");
    try {
      const RankGrids grids(job.sizes);
      EXPECT_TRUE(legal) << job.sizes.order;
      return {job, grids};
    } catch (const ConfigError& error) {
      EXPECT_FALSE(legal) << error.what();
    }
  }
}

std::vector<RankList> slices(const std::vector<RankList>& groups, size_t size, bool inside) {
  std::vector<RankList> result;
  for (const RankList& group : groups) {
    const size_t first = result.size(), parts = inside ? group.size() / size : size;
    result.resize(first + parts);
    for (size_t i = 0; i < group.size(); ++i)
      result[first + (inside ? i / size : i % size)].push_back(group[i]);
  }
  return result;
}

std::vector<RankList> expected(const Job& job, GroupKind kind) {
  const auto instances = static_cast<size_t>(job.sizes.optimizer_instances);
  const auto edp = static_cast<size_t>(job.expert.at("dp"));
  std::vector<RankList> result;
  switch (kind) {
    case ep:
    case tp_ep:
    case tp_ep_pp:
      return job.groups(true, to_string(kind));
    case expert_tp:
      return job.groups(true, "tp");
    case expert_dp:
      return job.groups(true, "dp");
    case embedding:
    case position_embedding:
      for (const RankList& stages : job.groups(false, "pp")) {
        result.push_back({stages.front()});
        if (kind == embedding && stages.size() > 1) result.back().push_back(stages.back());
      }
      return result;
    case intra_dp_cp: {
      const auto groups = job.groups(false, "dp-cp");
      return slices(groups, groups[0].size() / instances, true);
    }
    case intra_expert_dp:
      return slices(job.groups(true, "dp"), edp / instances, true);
    case inter_optimizer:
      if (instances == 1) return {};
      return slices(job.groups(true, "dp"), edp / instances, false);
    case intra_optimizer: {
      const auto parts = job.groups(true, "tp-ep-pp");
      for (size_t i = 0; i < parts.size(); ++i) {
        if (i % (edp / instances) == 0) result.emplace_back();
        result.back().insert(result.back().end(), parts[i].begin(), parts[i].end());
      }
      return result;
    }
    default:
      return job.groups(false, to_string(kind));
  }
}

/// Whether the look-ups agree with the lists and each rank is in one group, or in at most one for
/// kinds without some ranks. (Not one assertion per rank: there are millions.)
bool lookups_agree(const RankGrids& grids, GroupKind kind, const std::vector<RankList>& lists) {
  const RankGroups groups = grids.groups(kind);
  std::vector<int> seen(static_cast<size_t>(grids.sizes().world_size), 0);
  bool agree = true;
  for (int64_t index = 0; index < groups.count(); ++index) {
    const RankList& ranks = lists[static_cast<size_t>(index)];
    agree &= static_cast<int64_t>(ranks.size()) == groups.size();
    for (int64_t position = 0; agree && position < groups.size(); ++position) {
      const int64_t rank = ranks[static_cast<size_t>(position)];
      ++seen[static_cast<size_t>(rank)];
      agree &= groups.rank_at(index, position) == rank && groups.index_of(rank) == index &&
               groups.position_of(rank) == position;
    }
    agree = agree && grids.group_of(kind, ranks.front()) == ranks;
  }
  const bool some = kind == embedding || kind == position_embedding || groups.count() == 0;
  for (size_t i = 0; i < seen.size(); ++i) {
    const auto rank = static_cast<int64_t>(i);
    agree &= seen[i] == 1 || (some && seen[i] == 0);
    if (seen[i] == 0)
      agree &=
          !groups.index_of(rank) && !groups.position_of(rank) && grids.group_of(kind, rank).empty();
  }
  return agree;
}

TEST(RankGroups, TenThousandRandomGrids) {
  std::mt19937 random(1);
  for (int i = 0; i < kRandomGrids; ++i) {
    const auto [job, grids] = random_legal(random);
    for (const GroupKind kind : all_group_kinds()) {
      const std::vector<RankList> lists = expected(job, kind);
      const RankGroups groups = grids.groups(kind);
      std::vector<RankList> ours;
      for (int64_t index = 0; index < groups.count(); ++index) ours.push_back(groups.group(index));
      ASSERT_EQ(ours, lists) << job.sizes.order << " " << to_string(kind);
      ASSERT_TRUE(lookups_agree(grids, kind, lists)) << job.sizes.order << " " << to_string(kind);
    }
  }
}

TEST(RankGroups, IndicesOutsideAreRefused) {
  const RankGroups groups = RankGrids({.world_size = 8, .tensor = 2}).groups(tp);
  EXPECT_THROW(groups.group(4), UsageError);
  EXPECT_THROW(groups.group(-1), UsageError);
  EXPECT_THROW(groups.rank_at(0, 2), UsageError);
  EXPECT_THROW(groups.index_of(8), UsageError);
  EXPECT_THROW(groups.position_of(-1), UsageError);
  EXPECT_THROW(RankGroups().group(0), UsageError);
  EXPECT_EQ(RankGroups().index_of(0), std::nullopt);
  EXPECT_THROW(RankGroups(GroupSet({4}, {true}), GroupSet({3}, {true})), UsageError);
}

TEST(RankGroups, AWorldOfAnySizeIsNotListed) {
  constexpr int64_t kWorld = int64_t{1} << 40;
  const RankGrids grids({.world_size = kWorld, .tensor = 8, .pipeline = 16, .expert = 64});
  const RankGroups groups = grids.groups(tp_dp_cp);
  EXPECT_EQ(groups.size(), kWorld / 16);
  EXPECT_EQ(groups.rank_at(15, groups.size() - 1), kWorld - 1);
  EXPECT_EQ(groups.index_of(kWorld - 1), 15);
  EXPECT_EQ(grids.count(tp), kWorld / 8);
}

}  // namespace
}  // namespace lockstep
