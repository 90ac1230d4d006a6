#include "lockstep/training/trace_merge.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/training/trace_clocks.h"
#include "lockstep/training/trace_file.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;
using Offsets = std::vector<std::optional<double>>;

constexpr const char* kWorld = "all_reduce (sum) of loss over group world [0, 1], 24 bytes";

/// A trace as Kineto writes it, of a process 100 + rank.
struct WrittenTrace {
  int64_t rank;
  std::string host = "a";
  int64_t base_ns = 1'000'000'000;
  Json events = Json::array();

  WrittenTrace& slice(const std::string& name, double ts, double dur, int64_t tid = 7) {
    events.push_back({{"ph", "X"},
                      {"cat", "user_annotation"},
                      {"name", name},
                      {"ts", ts},
                      {"dur", dur},
                      {"pid", 100 + rank},
                      {"tid", tid}});
    return *this;
  }

  void write(const testing::TemporaryFolder& folder, int64_t world = 2) const {
    Json trace = {{"schemaVersion", 1}, {"baseTimeNanoseconds", base_ns}, {"traceEvents", events}};
    trace[kTraceHeaderKey] =
        Json::parse(trace_header_json({rank, world, /*process=*/100 + rank, host}));
    folder.write("rank_" + std::to_string(rank) + ".json", trace.dump());
  }
};

Json merged_in(const testing::TemporaryFolder& folder) {
  merge_traces(folder.path(), folder.path() / "merged.json");
  return Json::parse(folder.read("merged.json"));
}

/// The only slice with this name in a process.
Json slice_of(const Json& trace, const std::string& name, int64_t process) {
  Json found;
  for (const Json& event : trace.at("traceEvents"))
    if (event.value("name", "") == name && event.at("pid") == process) {
      EXPECT_TRUE(found.is_null()) << name;
      found = event;
    }
  return found;
}

TEST(ClockOffsets, AreMediansOverCollectivesOfBothHosts) {
  EXPECT_EQ(clock_offsets({{"a", {{"x", {10, 20}}, {"y", {30}}}},
                           {"b", {{"x", {110, 121}}, {"y", {930}}, {"z", {5}}}},
                           {"a", {}}}),
            (Offsets{0, 101, 0}));
}

TEST(ClockOffsets, GoThroughHostsInBetween) {
  EXPECT_EQ(clock_offsets({{"a", {{"x", {10}}}},
                           {"b", {{"x", {15}}, {"y", {100}}}},
                           {"c", {{"y", {107}}}},
                           {"d", {{"z", {1}}}}}),
            (Offsets{0, 5, 12, std::nullopt}));
}

TEST(ClockOffsets, OfANameThatOneRankHasMoreOftenNothingFollows) {
  EXPECT_EQ(clock_offsets({{"a", {{"x", {10, 20}}}}, {"b", {{"x", {1000}}}}}),
            (Offsets{0, std::nullopt}));
}

TEST(ClockOffsets, MessagesAndBroadcastsDoNotEndEverywhereAtOnce) {
  EXPECT_TRUE(ends_everywhere_at_once(kWorld));
  for (const char* name : {"wait for all_reduce (sum) of loss over group world [0, 1], 24 bytes",
                           "send (to 1) of x over group pp [0, 1], 4 bytes",
                           "broadcast (from 0) of x over group dp [0, 1], 4 bytes", "all_reduce"})
    EXPECT_FALSE(ends_everywhere_at_once(name)) << name;
}

TEST(MergeTraces, RanksBecomeProcessesOnOneClockOfTheirHost) {
  const testing::TemporaryFolder folder;
  WrittenTrace{.rank = 0}.slice("F0.0", 1000, 50).slice(kWorld, 1100, 10).write(folder);
  // The same clock; its times count from a microsecond earlier.
  WrittenTrace{.rank = 1, .base_ns = 999'999'000}
      .slice("F0.0", 1021, 50)
      .slice(kWorld, 1150, 10)
      .write(folder);
  const TraceMerge done = merge_traces(folder.path(), folder.path() / "merged.json");
  EXPECT_EQ(done.ranks, 2);
  EXPECT_TRUE(done.notes.empty());
  const Json merged = Json::parse(folder.read("merged.json"));
  EXPECT_EQ(done.events, static_cast<int64_t>(merged.at("traceEvents").size()));
  EXPECT_EQ(slice_of(merged, "F0.0", 0).at("ts"), 0);
  EXPECT_EQ(slice_of(merged, "F0.0", 1).at("ts"), 20);
  EXPECT_EQ(slice_of(merged, "F0.0", 1).at("dur"), 50);
  EXPECT_EQ(slice_of(merged, "process_name", 1).at("args").at("name"), "rank 1");
}

TEST(MergeTraces, ClocksOfOtherHostsAreAligned) {
  const testing::TemporaryFolder folder;
  WrittenTrace one{.rank = 0}, other{.rank = 1, .host = "b"};
  for (const double start : {0.0, 1000.0, 2000.0}) {
    one.slice(kWorld, start + 100, 10);
    other.slice(kWorld, start + 5'000'100 - 40, 50);  // it came earlier, and both end together
  }
  other.slice("F0.0", 5'000'500, 1);
  one.write(folder);
  other.write(folder);
  const Json merged = merged_in(folder);
  EXPECT_EQ(slice_of(merged, "F0.0", 1).at("ts"), 500 - 60);
}

TEST(MergeTraces, DevicesHaveProcessesOfTheirOwnAndKinetosNotesGo) {
  const testing::TemporaryFolder folder;
  for (const int64_t rank : {0, 1}) {
    WrittenTrace trace{.rank = rank};
    trace.slice("launch", 10, 1);
    trace.events.push_back({{"ph", "X"},
                            {"cat", "kernel"},
                            {"name", "gemm"},
                            {"ts", 12},
                            {"dur", 3},
                            {"pid", 0},
                            {"tid", 7}});
    trace.events.push_back(
        {{"ph", "s"}, {"id", 5}, {"name", "ac2g"}, {"ts", 10}, {"pid", 100 + rank}, {"tid", 7}});
    trace.events.push_back({{"ph", "M"},
                            {"name", "process_name"},
                            {"ts", 1},
                            {"pid", 100 + rank},
                            {"args", {{"name", "lockstep"}}}});
    trace.events.push_back({{"ph", "X"},
                            {"name", "PyTorch Profiler (0)"},
                            {"ts", 0},
                            {"dur", 99},
                            {"pid", "Spans"},
                            {"tid", "PyTorch Profiler"}});
    trace.write(folder);
  }
  const Json merged = merged_in(folder);
  std::map<std::string, std::set<int64_t>> processes;
  std::set<std::string> flows;
  for (const Json& event : merged.at("traceEvents")) {
    ASSERT_TRUE(event.at("pid").is_number_integer()) << event;
    if (event.at("name") == "process_name")
      processes[event.at("args").at("name")].insert(event.at("pid").get<int64_t>());
    if (event.contains("id")) flows.insert(event.at("id").get<std::string>());
  }
  EXPECT_EQ(processes.size(), 4);
  for (const char* name : {"rank 0", "rank 0, device 0", "rank 1", "rank 1, device 0"})
    EXPECT_EQ(processes[name].size(), 1) << name;
  EXPECT_EQ(flows, (std::set<std::string>{"0:5", "1:5"}));
}

TEST(MergeTraces, SaysWhichRanksAreMissing) {
  const testing::TemporaryFolder folder;
  WrittenTrace{.rank = 2}.slice("a", 1, 1).write(folder, 4);
  folder.write("rank_x.json", "no trace");
  folder.write("merged.json", "an old one");
  const TraceMerge done = merge_traces(folder.path(), folder.path() / "merged.json");
  ASSERT_EQ(done.notes.size(), 1);
  EXPECT_EQ(done.notes[0], "found traces of 1 of 4 ranks; missing: 0, 1, 3");
}

TEST(MergeTraces, RefusesWhatIsNoTrace) {
  const testing::TemporaryFolder folder;
  const auto merge = [&] { merge_traces(folder.path(), folder.path() / "merged.json"); };
  EXPECT_TRUE(testing::throws_with<FileError>(merge, "found no rank_0.json"));
  for (const char* text :
       {"", "{\"traceEvents\":[", "[]", "{}", "{\"lockstep\":{\"rank\":\"x\"}}"}) {
    folder.write("rank_0.json", text);
    EXPECT_TRUE(testing::throws_with<FileError>(merge, "rank_0.json")) << text;
  }
  folder.write("rank_0.json", "{\"lockstep\":{\"rank\":1e300}}");
  EXPECT_TRUE(testing::throws_with<FileError>(
      merge, "rank_0.json': 'rank': found 1e+300, allowed: a whole number"));
  WrittenTrace{.rank = 1}.write(folder);
  folder.write("rank_0.json", folder.read("rank_1.json"));
  EXPECT_TRUE(testing::throws_with<FileError>(merge, "both of rank 1"));
  WrittenTrace{.rank = 0}.write(folder, /*world=*/3);
  EXPECT_TRUE(testing::throws_with<FileError>(merge, "found a trace of 2 ranks, allowed: of 3"));
  EXPECT_THROW(merge_traces(folder.path() / "none", "x"), FileError);
}

}  // namespace
}  // namespace lockstep
