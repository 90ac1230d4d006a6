#pragma once

#include <string>
#include <vector>

#include "lockstep/tests/training/layout_curves.h"

/// Runs whose ranks compare what they hold or compute.
namespace lockstep::testing {

using Fields = std::vector<std::string>;

inline Fields with(Fields first, const Fields& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

/// A layout of a model.
struct CheckedRun {
  int64_t world;
  Fields model;
  Fields layout;
};

class CheckedRunsTest : public LayoutCurvesTest {
 protected:
  static RankThreadOptions options_of(const Config& config) {
    RankThreadOptions options;
    options.sizes = parallel_options(config, c10::kCPU).sizes;
    return options;
  }

  /// Three data-parallel ranks, of which two are a majority.
  Config three_ranks(const Fields& more = {}) const {
    return config(with({"train.global_batch_size=6"}, more), {});
  }

  /// Expects that the checks change nothing and report nothing.
  void expect_same_curves(const std::vector<CheckedRun>& runs, const Fields& checks) const {
    for (const CheckedRun& run : runs) {
      SCOPED_TRACE(fmt::format("{} ranks: {} {}", run.world, fmt::join(run.model, " "),
                               fmt::join(run.layout, " ")));
      const std::vector<double> expected = curve(config(run.model, run.layout), run.world);
      for (const std::string& check : checks)
        EXPECT_EQ(curve(config(with(run.model, {check}), run.layout), run.world), expected);
    }
  }
};

}  // namespace lockstep::testing
