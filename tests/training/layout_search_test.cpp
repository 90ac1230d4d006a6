// The search for the fastest layouts, where some layouts are refused.

#include "lockstep/training/layout_search.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/tests/training/planned_layouts.h"

namespace lockstep {
namespace {

using testing::config_of;
using testing::kExperts;
using testing::Overrides;
using testing::with;

using Load = std::function<Config(const Overrides&)>;

LayoutSearch search(const Load& load, int64_t num_simulated,
                    const std::vector<std::string>& kept = {"train.micro_batch_size"}) {
  const Machine machine = load_machine(LOCKSTEP_SOURCE_DIR "/configs/machines/dgx_a100.textproto");
  return search_layouts(load,
                        {.space = {.world_size = 2, .kept = kept},
                         .memory_bytes = 1e12,
                         .num_simulated = num_simulated},
                        machine);
}

/// Loads jobs, but refuses the first `count` layouts.
Load refuses_first(int count) {
  return [count, calls = 0](const Overrides& layout) mutable {
    const int call = calls++;  // the first is for the configuration itself
    if (call > 0 && call <= count) throw ConfigError("not this one");
    return config_of(layout);
  };
}

TEST(LayoutSearch, TheNextLayoutsTakeThePlacesOfRefusedOnes) {
  const LayoutSearch found = search(refuses_first(3), 2);
  ASSERT_EQ(found.refused.size(), 3u);
  EXPECT_EQ(found.refused.front().reason, "not this one");
  EXPECT_GE(found.best.size(), 2u);
  const LayoutSearch all = search(refuses_first(0), 2);
  EXPECT_TRUE(all.refused.empty());
  EXPECT_EQ(all.legal, found.legal);
}

TEST(LayoutSearch, GivesUpAfterFourTimesAsManyRefusals) {
  const LayoutSearch found = search(refuses_first(1000), 1);
  EXPECT_TRUE(found.best.empty());
  EXPECT_EQ(found.refused.size(), 4u);
  EXPECT_EQ(found.simulated, 4);
}

TEST(LayoutSearch, LeavesOutWhatATrainingDoesNotSupport) {
  const auto load = [](const Overrides& given) {
    return [given](const Overrides& layout) { return config_of(with(given, layout)); };
  };
  const Overrides graphs = {"train.cuda_graph=microbatch"};
  const LayoutSearch all = search(load({}), 1), found = search(load(graphs), 1);
  EXPECT_LT(found.legal, all.legal);  // there are no graphs of pipelines
  EXPECT_TRUE(found.refused.empty());
  ASSERT_FALSE(found.best.empty());
  for (const SimulatedLayout& layout : found.best) EXPECT_EQ(layout.layout.pipeline, 1);
  EXPECT_THROW(search(load(with(graphs, kExperts)), 1), ConfigError);
}

TEST(LayoutSearch, VariesOnlyToWhatIsLegal) {
  const Overrides two_stages = testing::layout({testing::kPipeline});
  const auto found = [&](const Overrides& given) {
    return search([&](const Overrides& more) { return config_of(with(given, more)); }, 1,
                  {"train.micro_batch_size", "parallel.pipeline_model_parallel_size",
                   "parallel.virtual_pipeline_model_parallel_size"});
  };
  const LayoutSearch dense = found(two_stages), experts = found(with(two_stages, kExperts));
  EXPECT_TRUE(dense.refused.empty());
  EXPECT_TRUE(experts.refused.empty());
  ASSERT_FALSE(experts.best.empty());
  EXPECT_EQ(experts.best.front().layout.pipeline, 2);
  EXPECT_EQ(dense.simulated, experts.simulated + 1);  // zb-h1, which experts do not have
}

}  // namespace
}  // namespace lockstep
