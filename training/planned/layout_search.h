#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/planner/layout_space.h"
#include "lockstep/planner/machine.h"
#include "lockstep/planner/time_simulation.h"

/// Which layouts of a job are the fastest on a machine.
namespace lockstep {

struct LayoutSearchOptions {
  LayoutSpace space = {};
  double memory_bytes = 0;     ///< of a device
  int64_t num_simulated = 24;  ///< layouts that are simulated, at most, before variations
  size_t num_best = 10;
  /// Is told which layout is simulated next.
  std::function<void(const std::string&)> progress = {};
};

/// A layout that was simulated and whose ranks all finish.
struct SimulatedLayout {
  JobLayout layout;
  std::vector<std::string> overrides = {};  ///< that make it of the configuration
  StepTime time = {};
  int64_t peak_bytes = 0;  ///< recorded_peaks() of the stage that needs most
  double estimated_s = 0;  ///< by LayoutEstimator
};

/// One that the program refuses although visit_layouts() has it, and why.
struct RefusedLayout {
  std::vector<std::string> overrides = {};
  std::string reason = {};
};

struct LayoutSearch {
  int64_t looked_at = 0;  ///< combinations of sizes
  int64_t legal = 0;      ///< layouts
  /// Layouts whose estimate is better than that of the last one that was simulated, but which do
  /// not fit the memory.
  int64_t too_large = 0;
  int64_t simulated = 0;
  double search_s = 0;                     ///< until simulation began
  std::vector<SimulatedLayout> best = {};  ///< the fastest first
  std::vector<RefusedLayout> refused = {};
};

/// The legal layouts in the order of their estimated times; of those that fit the memory by
/// plan_memory() the first `num_simulated` are simulated and verified, but no more than two that
/// differ in recomputation, sharding and instances alone. Of the fastest three, other schedules and
/// bucket sizes are simulated, too, unless these are kept. `load` gives the configuration with
/// overrides, as the program would have it for training. ConfigError as visit_layouts() and where
/// the machine has no link between hosts.
LayoutSearch search_layouts(const std::function<Config(const std::vector<std::string>&)>& load,
                            const LayoutSearchOptions& options, const Machine& machine);

}  // namespace lockstep
