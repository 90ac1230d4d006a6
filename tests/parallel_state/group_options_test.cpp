#include "lockstep/parallel_state/group_options.h"

#include <gtest/gtest.h>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

std::string option_refusal(const std::vector<std::string>& texts) {
  try {
    parse_group_options(texts);
    return "";
  } catch (const ConfigError& error) {
    return error.what();
  }
}

TEST(GroupOptions, EveryOptionIsRead) {
  const auto options = parse_group_options(
      {"dp-cp: timeout_seconds=1.5, high_priority_stream=true,min_ctas=4 , max_ctas=16, "
       "cga_cluster_size=2",
       "ep:max_ctas=8"});
  ASSERT_EQ(options.size(), 2U);
  const GroupOptions& dp_cp = options.at(GroupKind::dp_cp);
  EXPECT_EQ(dp_cp.timeout, std::chrono::milliseconds(1500));
  EXPECT_TRUE(dp_cp.high_priority_stream);
  EXPECT_EQ(dp_cp.min_ctas, 4);
  EXPECT_EQ(dp_cp.max_ctas, 16);
  EXPECT_EQ(dp_cp.cga_cluster_size, 2);
  EXPECT_EQ(options.at(GroupKind::ep), (GroupOptions{.max_ctas = 8}));
  EXPECT_TRUE(parse_group_options({}).empty());
}

TEST(GroupOptions, TextsReadBackToTheSame) {
  for (const std::string text :
       {"", "timeout_seconds=0.25", "high_priority_stream=true, min_ctas=1",
        "timeout_seconds=30, high_priority_stream=true, min_ctas=4, max_ctas=16, "
        "cga_cluster_size=0"}) {
    if (text.empty()) {
      EXPECT_EQ(to_string(GroupOptions()), text);
    } else {
      EXPECT_EQ(to_string(parse_group_options({"tp: " + text}).at(GroupKind::tp)), text);
    }
  }
}

TEST(GroupOptions, MistakesAreNamed) {
  EXPECT_TRUE(
      option_refusal({"dpcp: max_ctas=1"})
          .starts_with("parallel.group_options: found 'dpcp: max_ctas=1', which starts with "
                       "no kind of groups; allowed: tp, cp, dp, dp-cp, "));
  EXPECT_EQ(option_refusal({"tp"}),
            "parallel.group_options: found 'tp', allowed: options after a colon, as in tp: "
            "max_ctas=16");
  EXPECT_EQ(option_refusal({"tp: max_ctas=2", "tp: min_ctas=1"}),
            "parallel.group_options: tp is given twice, allowed: once");
  EXPECT_EQ(option_refusal({"tp: timeout_seconds=30, max_ctas=2, timeout_seconds=300"}),
            "parallel.group_options: in 'tp: timeout_seconds=30, max_ctas=2, timeout_seconds=300', "
            "timeout_seconds is given twice, allowed: once");
  EXPECT_EQ(option_refusal({"tp: ctas=2"}),
            "parallel.group_options: in 'tp: ctas=2', found 'ctas', allowed: timeout_seconds, "
            "high_priority_stream, min_ctas, max_ctas, cga_cluster_size, each with = and a value");
  EXPECT_EQ(option_refusal({"tp: max_ctas=0"}),
            "parallel.group_options: in 'tp: max_ctas=0', max_ctas: found '0', allowed: a whole "
            "number from 1 to 1024");
  EXPECT_EQ(option_refusal({"tp: cga_cluster_size=9"}),
            "parallel.group_options: in 'tp: cga_cluster_size=9', cga_cluster_size: found '9', "
            "allowed: a whole number from 0 to 8");
  EXPECT_EQ(
      option_refusal({"tp: high_priority_stream=yes"}),
      "parallel.group_options: in 'tp: high_priority_stream=yes', high_priority_stream: found "
      "'yes', allowed: true, false");
  EXPECT_EQ(option_refusal({"tp: min_ctas=3, max_ctas=2"}),
            "parallel.group_options: in 'tp: min_ctas=3, max_ctas=2', min_ctas: found 3, allowed: "
            "<= max_ctas (2)");
  for (const char* bad : {"tp:", "tp: max_ctas", "tp: max_ctas=1,", "tp: timeout_seconds=0",
                          "tp: timeout_seconds=nan", "tp: timeout_seconds=1e9", "", ": max_ctas=1"})
    EXPECT_NE(option_refusal({bad}), "") << bad;
}

}  // namespace
}  // namespace lockstep
