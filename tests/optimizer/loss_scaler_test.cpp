#include "lockstep/optimizer/loss_scaler.h"

#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

/// Scales and hysteresis trackers after each step; 'x' is a step with overflow, '.' one without.
struct Trace {
  std::vector<double> scales;
  std::vector<int64_t> hysteresis;
};

Trace trace_of(GradScaler& scaler, const std::string& steps) {
  Trace trace;
  for (const char step : steps) {
    scaler.update(step == 'x');
    trace.scales.push_back(scaler.scale());
    trace.hysteresis.push_back(scaler.state().hysteresis_tracker);
  }
  return trace;
}

TEST(DynamicGradScaler, G99HysteresisComesBackAfterAWholeWindowOnly) {
  DynamicGradScaler scaler({.initial_scale = 1024, .growth_interval = 2, .hysteresis = 2});
  const Trace trace = trace_of(scaler, "xxx..x..");
  EXPECT_EQ(trace.scales, (std::vector<double>{1024, 512, 256, 256, 512, 512, 512, 1024}));
  EXPECT_EQ(trace.hysteresis, (std::vector<int64_t>{1, 0, -1, -1, 2, 1, 1, 2}));
}

TEST(DynamicGradScaler, HasMegatronsDefaults) {
  DynamicGradScaler scaler;
  EXPECT_EQ(scaler.scale(), 4294967296.0);
  for (int i = 0; i < 999; ++i) scaler.update(false);
  EXPECT_EQ(scaler.scale(), 4294967296.0);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 8589934592.0);
  EXPECT_EQ(trace_of(scaler, "xx").scales, (std::vector<double>{8589934592.0, 4294967296.0}));
}

TEST(DynamicGradScaler, Table) {
  struct Case {
    DynamicGradScalerOptions options;
    std::string steps;
    std::vector<double> scales;
  };
  const std::vector<Case> cases = {
      // With a hysteresis of 1, every overflow halves the scale.
      {{.initial_scale = 8, .growth_interval = 3, .hysteresis = 1}, "x..x", {4, 4, 4, 2}},
      // Never below the minimum.
      {{.initial_scale = 4, .min_scale = 2, .growth_interval = 9, .hysteresis = 1},
       "xxx",
       {2, 2, 2}},
      // One clean step does not restore the hysteresis.
      {{.initial_scale = 16, .growth_interval = 3, .hysteresis = 2}, "x.x.x", {16, 16, 8, 8, 4}},
      // Every overflow restarts the window.
      {{.initial_scale = 4, .growth_interval = 2, .hysteresis = 9}, ".x.x..", {4, 4, 4, 4, 4, 8}},
      // Other factors.
      {{.initial_scale = 100, .growth_factor = 3, .backoff_factor = .25, .growth_interval = 1},
       ".xx.",
       {300, 300, 75, 225}}};
  for (const Case& test : cases) {
    DynamicGradScaler scaler(test.options);
    EXPECT_EQ(trace_of(scaler, test.steps).scales, test.scales) << test.steps;
  }
}

TEST(DynamicGradScaler, EqualsMegatronCore) {
  std::ifstream file(LOCKSTEP_SOURCE_DIR "/tests/optimizer/loss_scaler_golden.json");
  const auto cases = nlohmann::json::parse(file);
  ASSERT_EQ(cases.size(), 25u);
  for (const auto& test : cases) {
    const auto& numbers = test["numbers"];
    DynamicGradScaler scaler({.initial_scale = numbers["initial_scale"],
                              .min_scale = numbers["min_scale"],
                              .growth_factor = numbers["growth_factor"],
                              .backoff_factor = numbers["backoff_factor"],
                              .growth_interval = numbers["growth_interval"],
                              .hysteresis = numbers["hysteresis"]});
    const std::string overflows = test["overflows"];
    for (size_t i = 0; i < overflows.size(); ++i) {
      scaler.update(overflows[i] == 'x');
      const auto& expected = test["trace"][i];
      ASSERT_EQ(scaler.state(), (GradScalerState{expected[0], expected[1], expected[2]}))
          << numbers << " " << overflows << " step " << i;
    }
  }
}

TEST(DynamicGradScaler, GoesOnFromASavedState) {
  const DynamicGradScalerOptions options{
      .initial_scale = 1024, .growth_interval = 3, .hysteresis = 2};
  const std::string steps = "x..x.x...xx..";
  for (size_t cut = 0; cut <= steps.size(); ++cut) {
    DynamicGradScaler whole(options), first(options), second(options);
    trace_of(whole, steps);
    trace_of(first, steps.substr(0, cut));
    second.restore(first.state());
    trace_of(second, steps.substr(cut));
    EXPECT_EQ(second.state(), whole.state()) << cut;
  }
}

TEST(DynamicGradScaler, RefusesNonsenseByName) {
  const auto refused = [](const DynamicGradScalerOptions& options, const std::string& part) {
    return throws_with<ConfigError>([&] { DynamicGradScaler{options}; }, part);
  };
  EXPECT_TRUE(refused({.initial_scale = 0.5}, "initial_scale: found 0.5, allowed: >= min_scale"));
  EXPECT_TRUE(refused({.min_scale = 0}, "min_scale: found 0"));
  EXPECT_TRUE(refused({.growth_factor = 1}, "growth_factor: found 1, allowed: > 1"));
  EXPECT_TRUE(refused({.backoff_factor = 1}, "backoff_factor: found 1"));
  EXPECT_TRUE(refused({.growth_interval = 0}, "growth_interval: found 0"));
  EXPECT_TRUE(refused({.hysteresis = 0}, "hysteresis: found 0"));
  DynamicGradScaler scaler;
  EXPECT_TRUE(throws_with<ConfigError>([&] { scaler.restore({.scale = 0}); }, "found 0"));
  EXPECT_TRUE(throws_with<ConfigError>([&] { scaler.restore({.scale = 1, .growth_tracker = -1}); },
                                       "found -1"));
  EXPECT_EQ(scaler.scale(), 4294967296.0);
}

TEST(ConstantGradScaler, StaysAsItIs) {
  ConstantGradScaler scaler(128);
  EXPECT_EQ(trace_of(scaler, "x.x.").scales, (std::vector<double>{128, 128, 128, 128}));
  EXPECT_TRUE(throws_with<ConfigError>([] { ConstantGradScaler{-1}; }, "found -1"));
  EXPECT_TRUE(throws_with<ConfigError>(
      [] { ConstantGradScaler{std::numeric_limits<double>::infinity()}; }, "found inf"));
  scaler.restore({.scale = 2});
  EXPECT_EQ(scaler.scale(), 128);
  EXPECT_TRUE(throws_with<ConfigError>([&] { scaler.restore({.scale = 0}); }, "found 0"));
}

}  // namespace
}  // namespace lockstep
