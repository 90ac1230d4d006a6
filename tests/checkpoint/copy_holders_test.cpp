#include "lockstep/checkpoint/copy_holders.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "lockstep/checkpoint/block_transfers.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using Random = std::mt19937;

int64_t between(Random& random, int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(random);
}

TEST(CopyHoldersTest, OnOneHostTheNextRanksKeepCopies) {
  const std::vector<std::string> hosts(4, "a");
  EXPECT_EQ(copy_holders(hosts, 1), (std::vector<std::vector<int64_t>>{{1}, {2}, {3}, {0}}));
  EXPECT_EQ(copy_holders(hosts, 8),
            (std::vector<std::vector<int64_t>>{{1, 2, 3}, {2, 3, 0}, {3, 0, 1}, {0, 1, 2}}));
}

TEST(CopyHoldersTest, OtherHostsComeFirst) {
  EXPECT_EQ(copy_holders({"a", "a", "b", "b", "c", "c"}, 5),
            (std::vector<std::vector<int64_t>>{{2, 4, 3, 5, 1},
                                               {3, 5, 2, 4, 0},
                                               {4, 0, 5, 1, 3},
                                               {5, 1, 4, 0, 2},
                                               {0, 2, 1, 3, 5},
                                               {1, 3, 0, 2, 4}}));
}

TEST(CopyHoldersTest, OnAnyHostsCopiesAreOnOtherRanksAndFarAway) {
  Random random(1);
  for (int trial = 0; trial < 500; ++trial) {
    const int64_t num_hosts = between(random, 1, 4), each = between(random, 1, 4);
    const bool even = trial % 2 == 0;
    std::vector<std::string> hosts;
    for (int64_t host = 0; host < num_hosts; ++host)
      hosts.insert(hosts.end(), static_cast<size_t>(even ? each : between(random, 1, 4)),
                   std::to_string(host));
    if (trial % 3 == 0) std::shuffle(hosts.begin(), hosts.end(), random);
    const int64_t replicas = between(random, 0, 5);
    const auto holders = copy_holders(hosts, replicas);
    std::map<int64_t, int64_t> kept;
    for (size_t rank = 0; rank < hosts.size(); ++rank) {
      const std::set<int64_t> ranks(holders[rank].begin(), holders[rank].end());
      EXPECT_EQ(ranks.size(), holders[rank].size());
      EXPECT_EQ(ranks.size(), std::min<size_t>(static_cast<size_t>(replicas), hosts.size() - 1));
      EXPECT_FALSE(ranks.contains(static_cast<int64_t>(rank)));
      std::set<std::string> elsewhere;
      for (const int64_t holder : ranks) {
        elsewhere.insert(hosts[static_cast<size_t>(holder)]);
        ++kept[holder];
      }
      elsewhere.erase(hosts[rank]);
      const size_t others = std::set(hosts.begin(), hosts.end()).size() - 1;
      EXPECT_EQ(elsewhere.size(), std::min(static_cast<size_t>(replicas), others));
    }
    if (!even || replicas == 0 || hosts.size() == 1) continue;
    for (const auto& [holder, count] : kept)
      EXPECT_EQ(count, static_cast<int64_t>(holders.front().size())) << holder;
    EXPECT_EQ(kept.size(), hosts.size());
  }
}

TEST(CopyHoldersTest, TextsOfHeldCopiesComeBack) {
  const std::vector<HeldCopy> copies = {{{0, 3}, 7, 4, {0, 2}}, {{1, 0}, 8, 3, {1}}};
  EXPECT_EQ(parse_held_copies(format_held_copies(copies)), copies);
  EXPECT_TRUE(parse_held_copies("").empty());
  for (const char* bad : {"1 2 3\n", "1 2 3 4 4\n", "1 2 3 4 -1\n", "1 2 3 4 0 x\n", "a\n"})
    EXPECT_THROW(parse_held_copies(bad), FileError) << bad;
}

/// The newest copy for which all lists together have every part, found by trying each copy.
std::optional<CopyId> newest_by_trying(const std::vector<std::vector<HeldCopy>>& of_ranks,
                                       int64_t least) {
  std::set<CopyId> ids;
  for (const auto& list : of_ranks)
    for (const HeldCopy& copy : list) ids.insert(copy.id);
  for (auto id = ids.rbegin(); id != ids.rend(); ++id) {
    std::set<int64_t> parts;
    int64_t world = -1, iteration = -1;
    for (const auto& list : of_ranks)
      for (const HeldCopy& copy : list)
        if (copy.id == *id) {
          parts.insert(copy.parts.begin(), copy.parts.end());
          world = copy.world_size;
          iteration = copy.iteration;
        }
    if (static_cast<int64_t>(parts.size()) == world && iteration >= least) return *id;
  }
  return std::nullopt;
}

/// Two copies of a round, the second cut short at a random point. Some ranks are lost.
TEST(CopyHoldersTest, AfterRandomLossesTheNewestWholeCopyIsChosen) {
  Random random(2);
  int found = 0, second = 0, lost = 0;
  for (int trial = 0; trial < 5000; ++trial) {
    const int64_t ranks = between(random, 2, 6), replicas = between(random, 0, 3);
    const auto holders =
        copy_holders(std::vector<std::string>(static_cast<size_t>(ranks), "a"), replicas);
    std::vector<std::vector<HeldCopy>> held(static_cast<size_t>(ranks));
    for (int64_t number = 0; number < 2; ++number) {
      const bool cut = number == 1;
      for (auto& list : held) list.push_back({{5, number}, 10 + number, ranks, {}});
      const auto give = [&](int64_t part, int64_t to) {
        if (!cut || between(random, 0, 3) > 0)
          held[static_cast<size_t>(to)].back().parts.push_back(part);
      };
      for (int64_t part = 0; part < ranks; ++part) {
        give(part, part);
        for (const int64_t to : holders[static_cast<size_t>(part)]) give(part, to);
      }
    }
    for (auto& list : held)
      if (between(random, 0, 3) == 0) list.clear();
    const int64_t least = between(random, 9, 12);
    const CopyChoice choice = choose_copy(held, least);
    EXPECT_EQ(choice.id, newest_by_trying(held, least)) << trial;
    if (choice.id) {
      ++found;
      second += choice.id->number == 1;
      EXPECT_EQ(choice.iteration, 10 + choice.id->number);
      for (size_t part = 0; part < choice.holders.size(); ++part) {
        EXPECT_FALSE(choice.holders[part].empty());
        for (const int64_t rank : choice.holders[part]) {
          const auto& list = held[static_cast<size_t>(rank)];
          EXPECT_TRUE(std::any_of(list.begin(), list.end(), [&](const HeldCopy& copy) {
            return copy.id == *choice.id &&
                   std::count(copy.parts.begin(), copy.parts.end(), static_cast<int64_t>(part)) > 0;
          }));
        }
      }
      EXPECT_FALSE(choice.lost);
    } else if (choice.lost) {
      ++lost;
      for (const auto& list : held)
        for (const HeldCopy& copy : list)
          if (copy.iteration == choice.lost->iteration) {
            EXPECT_EQ(std::count(copy.parts.begin(), copy.parts.end(), choice.lost->rank), 0);
          }
    }
  }
  EXPECT_GT(found, 1000);
  EXPECT_GT(second, 200);
  EXPECT_GT(lost, 200);
}

/// The newest copy without the ranks in `left_out`.
std::optional<CopyId> newest_without(std::vector<std::vector<HeldCopy>> held,
                                     const std::set<size_t>& left_out) {
  for (const size_t rank : left_out) held[rank].clear();
  return newest_by_trying(held, 0);
}

TEST(CopyHoldersTest, SparesAreThoseWhoseCopiesOthersHaveToo) {
  Random random(4);
  int changed = 0, impossible = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    const int64_t ranks = between(random, 3, 7), replicas = between(random, 1, 2);
    const auto holders =
        copy_holders(std::vector<std::string>(static_cast<size_t>(ranks), "a"), replicas);
    std::vector<std::vector<HeldCopy>> held(static_cast<size_t>(ranks));
    for (auto& list : held) list.push_back({{0, 1}, 5, ranks, {}});
    for (int64_t part = 0; part < ranks; ++part) {
      held[static_cast<size_t>(part)].front().parts.push_back(part);
      for (const int64_t to : holders[static_cast<size_t>(part)])
        held[static_cast<size_t>(to)].front().parts.push_back(part);
    }
    held.erase(held.begin() + between(random, 0, ranks - 1));
    const auto going = ranks_that_go_on(held, held.size() - 1);
    ASSERT_EQ(going.size(), held.size() - 1);
    EXPECT_TRUE(std::is_sorted(going.begin(), going.end()));
    std::set<size_t> spare;
    bool possible = false;
    for (size_t rank = 0; rank < held.size(); ++rank) {
      if (std::count(going.begin(), going.end(), rank) == 0) spare.insert(rank);
      possible = possible || newest_without(held, {rank}) == CopyId{0, 1};
    }
    EXPECT_EQ(newest_without(held, spare), possible ? std::optional(CopyId{0, 1}) : std::nullopt);
    changed += !spare.contains(held.size() - 1);
    impossible += !possible;
  }
  EXPECT_GT(changed, 100);
  EXPECT_GT(impossible, 0);
  EXPECT_EQ(ranks_that_go_on({{}, {}, {}, {}}, 2), (std::vector<size_t>{0, 1}));
}

TEST(BlockTransfersTest, EachBlockComesOnceFromARankThatHasIt) {
  Random random(3);
  for (int trial = 0; trial < 500; ++trial) {
    const int64_t ranks = between(random, 2, 5), files = between(random, 1, 4),
                  most = between(random, 1, 5);
    std::vector<std::vector<int64_t>> holders(static_cast<size_t>(files));
    std::vector<std::vector<BlockRun>> needs(static_cast<size_t>(ranks));
    std::multiset<std::tuple<int64_t, int64_t, int64_t>> wanted;
    for (int64_t file = 0; file < files; ++file) {
      for (int64_t rank = 0; rank < ranks; ++rank)
        if (between(random, 0, 1) == 0) holders[static_cast<size_t>(file)].push_back(rank);
      auto& have = holders[static_cast<size_t>(file)];
      if (have.empty()) have.push_back(between(random, 0, ranks - 1));
      for (int64_t rank = 0; rank < ranks; ++rank) {
        if (std::count(have.begin(), have.end(), rank) > 0) continue;
        const int64_t first = between(random, 0, 9), last = first + between(random, 1, 9);
        needs[static_cast<size_t>(rank)].push_back({file, first, last});
        for (int64_t block = first; block < last; ++block) wanted.emplace(rank, file, block);
      }
    }
    std::multiset<std::tuple<int64_t, int64_t, int64_t>> given;
    for (const auto& turn : plan_transfers(needs, holders, most)) {
      std::map<int64_t, int64_t> from, to;
      for (const BlockTransfer& transfer : turn) {
        given.emplace(transfer.to, transfer.file, transfer.block);
        const auto& have = holders[static_cast<size_t>(transfer.file)];
        EXPECT_EQ(std::count(have.begin(), have.end(), transfer.from), 1);
        EXPECT_LE(++from[transfer.from], most);
        EXPECT_LE(++to[transfer.to], most);
      }
    }
    EXPECT_EQ(given, wanted);
    for (const auto& list : needs) EXPECT_EQ(parse_block_runs(format_block_runs(list)), list);
  }
}

TEST(BlockTransfersTest, RanksWithDifferentGiversTakeTogetherEachInItsOrder) {
  const std::vector<BlockRun> of_two = {{0, 6, 8}, {0, 0, 6}}, of_three = {{1, 0, 8}};
  const auto turns = plan_transfers({{}, {}, of_two, of_three}, {{0}, {1}}, 4);
  ASSERT_EQ(turns.size(), 2u);
  std::vector<int64_t> blocks;
  for (const auto& turn : turns) {
    EXPECT_EQ(turn.size(), 8u);
    for (const BlockTransfer& transfer : turn)
      if (transfer.to == 2) blocks.push_back(transfer.block);
  }
  EXPECT_EQ(blocks, std::vector<int64_t>({6, 7, 0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(plan_transfers({{}, {{0, 0, 8}}, {{0, 0, 8}}}, {{0}}, 4).size(), 4u);  // only one giver
}

TEST(BlockTransfersTest, TheRanksThatHaveAFileShareTheWork) {
  const auto turns = plan_transfers({{}, {}, {}, {{0, 0, 30}}}, {{0, 1, 2}}, 100);
  ASSERT_EQ(turns.size(), 1u);
  std::map<int64_t, int64_t> given;
  for (const BlockTransfer& transfer : turns.front()) ++given[transfer.from];
  EXPECT_EQ(given, (std::map<int64_t, int64_t>{{0, 10}, {1, 10}, {2, 10}}));
  EXPECT_TRUE(plan_transfers({{}, {}}, {{0}}, 4).empty());
  EXPECT_THROW(plan_transfers({{{0, 0, 1}}}, {{0}}, 4), UsageError);
  EXPECT_THROW(plan_transfers({{{0, 0, 1}}}, {{}}, 4), UsageError);
  EXPECT_THROW(parse_block_runs("0 1 x\n"), FileError);
}

}  // namespace
}  // namespace lockstep
