#include "lockstep/datasets/batch_sizes.h"

#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "lockstep/core/config_io.h"
#include "lockstep/core/config_rules.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

TrainConfig sizes(int64_t micro, int64_t global, const std::string& rampup = "") {
  TrainConfig config;
  config.micro_batch_size = micro;
  config.global_batch_size = global;
  if (!rampup.empty()) config.rampup_batch_size = rampup;
  return config;
}

TEST(BatchSizes, G105NumberOfMicrobatches) {
  EXPECT_EQ(batch_sizes(sizes(8, 32), 2), (BatchSizes{8, 32, 2}));
  EXPECT_EQ(batch_sizes(sizes(8, 16), 2), (BatchSizes{8, 16, 1}));
  for (const auto& [config, ranks] :
       {std::pair(sizes(8, 32), 3), {sizes(8, 33), 2}, {sizes(4, 16), 3}})
    EXPECT_TRUE(throws_with<ConfigError>([&] { batch_sizes(config, ranks); },
                                         "train.global_batch_size: found "));
  TrainConfig unset;
  unset.micro_batch_size = 3;
  EXPECT_EQ(batch_sizes(unset, 4), (BatchSizes{3, 12, 1}));
}

/// Written by scripts/golden/batch_sizes.py from Megatron Core.
TEST(BatchSchedule, GrowsAsMegatrons) {
  const auto golden = nlohmann::json::parse(
      std::ifstream(LOCKSTEP_SOURCE_DIR "/tests/datasets/batch_sizes_golden.json"));
  size_t rows = 0;
  for (const auto& test : golden) {
    const BatchSchedule schedule(sizes(test["micro"], test["global"], test["rampup"]),
                                 test["ranks"].get<int64_t>());
    const auto all = schedule.all();
    for (const auto& row : test["rows"]) {
      const BatchSizes expected{test["micro"], row[1], row[2]};
      EXPECT_EQ(schedule.at(row[0]), expected) << test["rampup"] << ", " << row;
      EXPECT_NE(std::find(all.begin(), all.end(), expected), all.end());
      ++rows;
    }
    EXPECT_EQ(all.back(), schedule.full());
    EXPECT_EQ(schedule.full().global, test["global"]);
  }
  EXPECT_GT(rows, 500u);
}

TrainConfig steps(const std::string& schedule) {
  TrainConfig config;
  config.micro_batch_size = 1;
  config.step_batch_size_schedule = schedule;
  return config;
}

TEST(BatchSchedule, G106StepsOfTheBatch) {
  const std::string rest = "512 600000:1024 1500000:2048 3000000:4096 6000000:6144";
  EXPECT_TRUE(throws_with<ConfigError>(
      [&] { BatchSchedule(steps("0:256 200000:" + rest), 512); },
      "which has a batch of 256, allowed: multiples of 512 (train.micro_batch_size 1 * 512"));
  const BatchSchedule schedule(steps("0:" + rest), 512);
  EXPECT_EQ(schedule.full(), (BatchSizes{1, 6144, 12}));
  EXPECT_EQ(schedule.all().size(), 5u);
  for (const auto& [consumed, global] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 512},
                                                {599'999, 512},
                                                {600'000, 1024},
                                                {1'499'999, 1024},
                                                {1'500'000, 2048},
                                                {3'000'001, 4096},
                                                {6'000'000, 6144},
                                                {1'000'000'000, 6144}})
    EXPECT_EQ(schedule.at(consumed), (BatchSizes{1, global, global / 512})) << consumed;
  EXPECT_EQ(BatchSchedule(steps("0:256 200000:" + rest), 256).at(199'999), (BatchSizes{1, 256, 1}));
}

TEST(BatchSchedule, StepsThatMakeNoSenseAreNamed) {
  for (const char* text : {"", " ", "0", "0:", "1:4", "0:0", "0:4 0:8", "0:4 8:8 4:8", "0:4,8:8",
                           "0:4:8", "0:-4", "a:b", "0:4 8:9223372036854775808"})
    EXPECT_TRUE(throws_with<ConfigError>([&] { parse_step_batch_size_schedule(text); },
                                         "train.step_batch_size_schedule: found '" +
                                             std::string(text) + "', allowed: SAMPLES:BATCH"));
  Config config;
  config.train = steps("0:4");
  config = resolve(config);
  check_rules(config);
  config.train.global_batch_size = 4;
  EXPECT_TRUE(throws_with<ConfigError>([&] { check_rules(config); },
                                       "allowed without train.global_batch_size"));
}

TEST(BatchSchedule, WithoutARampUpNothingGrows) {
  for (const char* rampup : {"", "16 4 1000"}) {
    const BatchSchedule schedule(sizes(2, 16, rampup), 2);
    EXPECT_EQ(schedule.all(), (std::vector<BatchSizes>{{2, 16, 4}}));
    EXPECT_EQ(schedule.at(0), schedule.full());
    EXPECT_EQ(schedule.at(1'000'000), schedule.full());
  }
}

/// Configurations, each with its number of data-parallel ranks.
std::vector<std::pair<TrainConfig, int64_t>> changing_batches() {
  std::vector<std::pair<TrainConfig, int64_t>> cases;
  for (const char* rampup : {"", "16 4 1000", "4 4 100", "4 4 1", "4 4 97", "8 8 1", "12 4 5000"})
    cases.emplace_back(sizes(2, 16, rampup), 2);
  cases.emplace_back(sizes(1, 107, "1 1 1234"), 1);  // 106 steps of 11.64 samples
  for (const char* schedule : {"0:16", "0:4 6:8 14:16", "0:4 40:16 100:8", "0:16 1:4 2:8 333:12"})
    cases.emplace_back(steps(schedule), 4);
  return cases;
}

std::string named(const TrainConfig& config) {
  return config.rampup_batch_size.value_or("") + config.step_batch_size_schedule.value_or("");
}

TEST(BatchSchedule, SamplesOfIterationsAreThoseThatOneCounts) {
  for (const auto& [config, ranks] : changing_batches()) {
    const BatchSchedule schedule(config, ranks);
    int64_t consumed = 0;
    for (int64_t iterations = 0; iterations < 500; ++iterations) {
      EXPECT_EQ(schedule.samples_of(iterations), consumed) << iterations << " of " << named(config);
      const int64_t next = consumed + schedule.at(consumed).global;
      EXPECT_EQ(schedule.iterations_until(consumed + 1), iterations + 1) << named(config);
      EXPECT_EQ(schedule.iterations_until(next), iterations + 1) << named(config);
      consumed = next;
    }
  }
}

TEST(BatchSchedule, IterationsForFullBatchesAreThoseThatOneCounts) {
  for (const auto& [config, ranks] : changing_batches()) {
    const BatchSchedule schedule(config, ranks);
    int64_t consumed = 0, counted = 0;
    for (int64_t full = 0; full < 500; ++full) {
      for (; consumed < full * schedule.full().global; ++counted)
        consumed += schedule.at(consumed).global;
      EXPECT_EQ(schedule.iterations_for(full), counted) << full << " of " << named(config);
    }
  }
}

TEST(BatchSchedule, IterationsForHugeNumbersOfBatches) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMany = 100'000'000'000'000;  // whose samples a double holds exactly
  EXPECT_EQ(BatchSchedule(sizes(2, 16), 2).iterations_for(kMany), kMany);
  // A fifth of the samples in batches of 8, then batches of 16.
  EXPECT_EQ(BatchSchedule(sizes(2, 16, "8 8 320000000000000"), 2).iterations_for(kMany),
            kMany / 5 * 6);
  EXPECT_EQ(BatchSchedule(steps("0:4 320000000000000:16"), 4).iterations_for(kMany), kMany / 5 * 8);
  EXPECT_EQ(BatchSchedule(sizes(2, 16), 2).iterations_for(kMost / 16), kMost / 16);
  EXPECT_EQ(BatchSchedule(sizes(2, 16), 2).iterations_for(kMost / 16 + 1), kMost);
  EXPECT_EQ(BatchSchedule(sizes(2, 16, "8 8 9223372036854775807"), 2).iterations_for(kMost / 32),
            kMost / 32 * 2);
  EXPECT_EQ(BatchSchedule(sizes(2, 16, "8 8 320000000000000"), 2).samples_of(kMany / 5 * 6),
            kMany * 16);
  EXPECT_EQ(BatchSchedule(sizes(2, 16), 2).samples_of(kMost / 16), kMost / 16 * 16);
  EXPECT_EQ(BatchSchedule(sizes(2, 16), 2).samples_of(kMost / 16 + 1), kMost);
  EXPECT_EQ(BatchSchedule(sizes(1, 7), 1).samples_of(kMost), kMost) << "a multiple of 7";
  EXPECT_EQ(BatchSchedule(steps("0:4 320000000000000:16"), 4).samples_of(kMost), kMost);
}

TEST(BatchSchedule, IterationsMayConsumeMoreThanFitsInto64Bits) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(BatchSchedule(sizes(2, 16), 2).iterations_until(kMost), kMost / 16 + 1);
  // The batches of 4 before the change at kMost - 1 consume kMost + 1.
  const BatchSchedule schedule(steps("0:4 9223372036854775806:7"), 1);
  EXPECT_EQ(schedule.iterations_until(kMost), kMost / 4 + 1);
  EXPECT_EQ(schedule.iterations_until(kMost - 3), kMost / 4);
  EXPECT_EQ(schedule.iterations_for(kMost / 7), kMost / 4 + 1) << "a multiple of 7";
  EXPECT_EQ(schedule.samples_of(kMost / 4 + 1), kMost);
}

TEST(BatchSchedule, NamesWhatDoesNotFit) {
  const auto refused = [](const std::string& rampup, const std::string& part) {
    return throws_with<ConfigError>([&] { BatchSchedule(sizes(2, 16, rampup), 2); }, part);
  };
  EXPECT_TRUE(refused("4 5 100", "found '4 5 100', allowed: a START of at most, and steps of"));
  EXPECT_TRUE(refused("20 4 100", "the global batch of 16"));
  EXPECT_TRUE(refused("6 10 100", "which has a batch of 6, allowed: multiples of 4"));
  EXPECT_TRUE(refused("4 2 100", "which has a batch of 6, allowed: multiples of 4"));
  for (const char* text : {"4 4", "4 4 100 1", "4,4,100", "a b c", "0 4 100", "4 0 100", "4 4 0",
                           "", "4 4 1e3", "4 4 99999999999999999999"})
    EXPECT_TRUE(throws_with<ConfigError>([&] { parse_rampup_batch_size(text); },
                                         "train.rampup_batch_size: found '" + std::string(text)));
  const BatchRampUp spaced = parse_rampup_batch_size(" 4  8 100 ");
  EXPECT_EQ(spaced.start + spaced.increment + spaced.samples, 112);
}

}  // namespace
}  // namespace lockstep
