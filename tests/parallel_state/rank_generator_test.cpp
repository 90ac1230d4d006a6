#include "lockstep/parallel_state/rank_generator.h"

#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <set>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using Groups = std::vector<RankList>;

Groups all(const GroupSet& set) {
  Groups groups;
  for (int64_t i = 0; i < set.count(); ++i) groups.push_back(set.group(i));
  return groups;
}

TEST(MaskedOrthogonal, G14) {
  EXPECT_EQ(all(GroupSet({2, 3, 4}, {false, true, false})), (Groups{{0, 2, 4},
                                                                    {1, 3, 5},
                                                                    {6, 8, 10},
                                                                    {7, 9, 11},
                                                                    {12, 14, 16},
                                                                    {13, 15, 17},
                                                                    {18, 20, 22},
                                                                    {19, 21, 23}}));
}

TEST(MaskedOrthogonal, G15) {
  EXPECT_EQ(all(GroupSet({2, 2, 2}, {true, false, true})), (Groups{{0, 1, 4, 5}, {2, 3, 6, 7}}));
}

TEST(RankGenerator, TokensMayBeAskedInAnyOrder) {
  const RankGenerator generator({.tp = 2, .cp = 2, .dp = 2}, "tp-cp-ep-dp-pp");
  EXPECT_EQ(all(generator.groups("dp-cp")), all(generator.groups("cp-dp")));
}

TEST(RankGenerator, G7OrderWithThePipelineInside) {
  const RankGenerator generator({.tp = 2, .dp = 2, .pp = 2}, "tp-pp-dp");
  EXPECT_EQ(all(generator.groups("pp")), (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}}));
  EXPECT_EQ(all(generator.groups("dp")), (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(all(generator.groups("tp-pp")), (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}}));
  EXPECT_EQ(generator.order(), "tp-pp-dp-cp-ep");
}

TEST(RankGenerator, BadOrdersAreNamed) {
  const auto message = [](const GridSizes& sizes, const char* order) -> std::string {
    try {
      RankGenerator(sizes, order);
      return "";
    } catch (const ConfigError& error) {
      return error.what();
    }
  };
  EXPECT_EQ(message({.pp = 2}, "tp-dp"), "order 'tp-dp': lacks axis 'pp', whose size is 2");
  EXPECT_EQ(message({}, "tp-xp"), "order 'tp-xp': found axis 'xp', allowed: tp, cp, ep, dp, pp");
  EXPECT_EQ(message({}, "tp-dp-tp"), "order 'tp-dp-tp': axis 'tp' is named twice");
  EXPECT_EQ(message({}, ""), "order '': found axis '', allowed: tp, cp, ep, dp, pp");
  EXPECT_EQ(message({.tp = 0}, "tp"), "tp: found size 0, allowed: >= 1");
  EXPECT_EQ(message({.cp = 2, .ep = 2}, "tp-cp-ep-dp-pp"),
            "ep (2) and cp (2): one grid holds only one of the two above 1");
  EXPECT_THROW(RankGenerator({}, "tp").groups("tp-").group(0), UsageError);
}

TEST(RankGenerator, RandomGridsPartitionTheWorldAndInvert) {
  std::mt19937 random(1);
  const auto size = [&] { return static_cast<int64_t>(1 + random() % 4); };
  for (int trial = 0; trial < 300; ++trial) {
    const GridSizes sizes = {.tp = size(), .cp = size(), .dp = size(), .pp = size()};
    std::vector<std::string> axes = {"tp", "cp", "dp", "pp"};
    std::shuffle(axes.begin(), axes.end(), random);
    const RankGenerator generator(sizes, axes[0] + "-" + axes[1] + "-" + axes[2] + "-" + axes[3]);
    for (const char* token : {"tp", "cp", "dp", "pp", "tp-pp", "dp-cp", "tp-cp-dp-pp"}) {
      const GroupSet groups = generator.groups(token);
      std::set<int64_t> seen;
      for (int64_t g = 0; g < groups.count(); ++g) {
        const RankList ranks = groups.group(g);
        ASSERT_EQ(static_cast<int64_t>(ranks.size()), groups.size());
        for (size_t position = 0; position < ranks.size(); ++position) {
          ASSERT_TRUE(seen.insert(ranks[position]).second);
          ASSERT_EQ(groups.index_of(ranks[position]), g);
          ASSERT_EQ(groups.position_of(ranks[position]), static_cast<int64_t>(position));
        }
      }
      ASSERT_EQ(static_cast<int64_t>(seen.size()), sizes.world());
      ASSERT_EQ(*seen.rbegin(), sizes.world() - 1);
    }
  }
}

}  // namespace
}  // namespace lockstep
