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
  int64_t num_simulated = 24;  ///< layouts to simulate and list, at most, before variations
  size_t num_best = 10;
  /// Called with the layout that is simulated next.
  std::function<void(const std::string&)> progress = {};
};

/// A layout that was simulated and whose ranks all finish.
struct SimulatedLayout {
  JobLayout layout;
  std::vector<std::string> overrides = {};  ///< that turn the configuration into it
  StepTime time = {};
  int64_t peak_bytes = 0;  ///< recorded_peaks() of the stage that needs the most
  double estimated_s = 0;  ///< by LayoutEstimator
};

/// A layout that the program refuses although it seemed to fit, and why.
struct RefusedLayout {
  std::vector<std::string> overrides = {};
  std::string reason = {};
};

struct LayoutSearch {
  int64_t looked_at = 0;         ///< combinations of sizes
  int64_t legal = 0;             ///< layouts, without those that check_supported() refuses
  std::string why_illegal = {};  ///< if none is legal and the configuration is refused, too: why
  /// Layouts that do not fit the memory, although their estimate is better than that of the last
  /// one that was simulated.
  int64_t too_large = 0;
  int64_t simulated = 0;
  double search_s = 0;                     ///< until simulation began
  std::vector<SimulatedLayout> best = {};  ///< the fastest first
  std::vector<RefusedLayout> refused = {};
};

/// Sorts the legal layouts that check_supported() accepts by their estimated times. Of those that
/// fit the memory according to plan_memory(), it simulates and verifies the first `num_simulated`,
/// but no more than two that differ only in recomputation, sharding and instances. The next ones
/// take the places of those that turn out to be refused, until four times as many are simulated.
/// For the fastest three it also simulates other schedules and bucket sizes, unless these are kept
/// or not legal. `load` returns the configuration with overrides, as the program would use it for
/// training. ConfigError as for visit_layouts(), if check_supported() refuses all layouts, and if
/// the machine has no link between hosts.
LayoutSearch search_layouts(const std::function<Config(const std::vector<std::string>&)>& load,
                            const LayoutSearchOptions& options, const Machine& machine);

}  // namespace lockstep
