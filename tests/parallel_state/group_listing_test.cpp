#include "lockstep/parallel_state/group_listing.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;

const RankGrids kGrids(
    {.world_size = 16, .pipeline = 4, .context = 4, .hierarchical_context = {2, 2}});

Json json_of(const RankGrids& grids, const GroupListing& listing) {
  std::ostringstream out;
  write_groups_json(out, grids, listing);
  return Json::parse(out.str());
}

TEST(GroupListing, ListsEveryGroupInOrder) {
  const Json json = json_of(kGrids, {});
  EXPECT_EQ(json["world_size"], 16);
  EXPECT_EQ(json["order"], "tp-cp-ep-dp-pp");
  EXPECT_EQ(json["sizes"].dump(), R"({"tp":1,"cp":4,"dp":1,"pp":4,"ep":1,"etp":1,"edp":4})");
  std::vector<std::string> names;
  for (const auto& [name, groups] : json["groups"].items()) names.push_back(name);
  ASSERT_EQ(names.size(), all_group_kinds().size() + 2);
  for (const GroupKind kind : all_group_kinds()) {
    EXPECT_EQ(names[static_cast<size_t>(kind)], to_string(kind));
    Json lists = Json::array();
    for (int64_t i = 0; i < kGrids.count(kind); ++i) lists.push_back(kGrids.group(kind, i));
    EXPECT_EQ(json["groups"][to_string(kind)], lists);
  }
  EXPECT_EQ(json["groups"]["cp-level-1"].dump(),
            "[[0,2],[1,3],[4,6],[5,7],[8,10],[9,11],[12,14],[13,15]]");
}

TEST(GroupListing, GroupsOfOneRank) {
  const Json groups = json_of(kGrids, {.rank = 5})["groups"];
  EXPECT_EQ(groups["pp"], (RankList{1, 5, 9, 13}));
  EXPECT_EQ(groups["embedding"], Json::array());
  EXPECT_EQ(groups["inter-optimizer"], Json::array());
  EXPECT_EQ(groups["cp-level-0"], (RankList{4, 5}));
}

TEST(GroupListing, Summary) {
  const Json groups = json_of(kGrids, {.summary = true})["groups"];
  EXPECT_EQ(groups["pp"].dump(), R"({"count":4,"size":4})");
  EXPECT_EQ(groups["embedding"].dump(), R"({"count":4,"size":2})");
  EXPECT_EQ(groups["inter-optimizer"].dump(), R"({"count":0,"size":0})");
  EXPECT_EQ(groups["cp-level-1"].dump(), R"({"count":8,"size":2})");
}

TEST(GroupListing, TextForPeople) {
  std::ostringstream all, one, summary;
  write_groups_text(all, kGrids, {});
  EXPECT_NE(all.str().find("\npp                  0 4 8 12 | 1 5 9 13 | 2 6 10 14 | 3 7 11 15\n"),
            std::string::npos);
  write_groups_text(one, kGrids, {.rank = 5});
  EXPECT_NE(one.str().find("\ncp                  4 5 6 7\n"), std::string::npos);
  EXPECT_NE(one.str().find("\nembedding           -\n"), std::string::npos);
  write_groups_text(summary, kGrids, {.summary = true});
  EXPECT_NE(summary.str().find("\nembedding           4 x 2\n"), std::string::npos);
}

TEST(GroupListing, ListsLongerThanTheBufferAreWhole) {
  const RankGrids grids({.world_size = 100000});
  const Json json = json_of(grids, {.rank = 99999});
  EXPECT_EQ(json["groups"]["dp"].get<RankList>(), grids.group(GroupKind::dp, 0));
}

TEST(GroupListing, RanksOutsideTheWorldAreRefused) {
  std::ostringstream out;
  for (const int64_t rank : {-1, 16})
    EXPECT_THROW(write_groups_json(out, kGrids, {.rank = rank}), ConfigError);
  EXPECT_THROW(write_groups_text(out, kGrids, {.rank = 0, .summary = true}), ConfigError);
  EXPECT_EQ(out.str(), "");
}

}  // namespace
}  // namespace lockstep
