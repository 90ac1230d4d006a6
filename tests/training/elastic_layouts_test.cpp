#include "lockstep/training/elastic_layouts.h"

#include <gtest/gtest.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"

namespace lockstep {
namespace {

Config config_of(const std::vector<std::string>& overrides) {
  return parse_config("", "test", overrides);
}

using Sizes = std::vector<int64_t>;

TEST(ElasticLayouts, TheBatchDecidesHowManyRanksFit) {
  EXPECT_EQ(
      fitting_world_sizes(config_of({"train.micro_batch_size=2", "train.global_batch_size=12"}), 8),
      (Sizes{6, 3, 2, 1}));
}

TEST(ElasticLayouts, AModelKeepsItsRanks) {
  EXPECT_EQ(
      fitting_world_sizes(config_of({"parallel.tensor_model_parallel_size=2",
                                     "parallel.pipeline_model_parallel_size=2",
                                     "train.micro_batch_size=1", "train.global_batch_size=4"}),
                          12),
      (Sizes{8, 4}));
  EXPECT_EQ(fitting_world_sizes(config_of({"parallel.tensor_model_parallel_size=4"}), 3), Sizes{});
}

TEST(ElasticLayouts, EveryBatchOfARampUpHasToFit) {
  EXPECT_EQ(fitting_world_sizes(config_of({"train.micro_batch_size=1", "train.global_batch_size=12",
                                           "train.rampup_batch_size=4 4 100"}),
                                12),
            (Sizes{4, 2, 1}));
}

TEST(ElasticLayouts, TheFieldsThatDecideAreNamed) {
  EXPECT_EQ(
      limits_of_world_size(config_of({"parallel.tensor_model_parallel_size=2",
                                      "train.micro_batch_size=2", "train.global_batch_size=8"})),
      "parallel.tensor_model_parallel_size = 2, train.micro_batch_size = 2, "
      "train.global_batch_size = 8");
}

TEST(ElasticLayouts, AnUnsetBatchIsThatOfTheFirstRanks) {
  Config config = config_of({"train.micro_batch_size=2", "parallel.tensor_model_parallel_size=2"});
  keep_global_batch(config, 8, "", {});
  EXPECT_EQ(config.train.global_batch_size, 8);
  keep_global_batch(config, 4, "", {});
  EXPECT_EQ(config.train.global_batch_size, 8);
  Config given = config_of({"train.global_batch_size=6"});
  keep_global_batch(given, 3, "", {});
  EXPECT_EQ(given.train.global_batch_size, 6);
}

}  // namespace
}  // namespace lockstep
