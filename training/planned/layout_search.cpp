#include "lockstep/training/layout_search.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <map>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/parallel_state/job_program.h"
#include "lockstep/parallel_state/order_proof.h"
#include "lockstep/planner/layout_estimate.h"
#include "lockstep/planner/memory_plan.h"
#include "lockstep/planner/shared_cores.h"
#include "lockstep/training/planned_job.h"
#include "lockstep/training/run_setup.h"

namespace lockstep {
namespace {

constexpr size_t kVaried = 3;      // fastest layouts that are varied
constexpr int64_t kMostAlike = 2;  // layouts that differ only in what they keep in memory
constexpr int64_t kMostTries = 4;  // simulations for each of the layouts to simulate
constexpr int64_t kFewBuckets = 4;

struct Estimated {
  JobLayout layout;
  double seconds = 0;
  bool passed = false;  ///< it was simulated, or does not fit
};

/// Whether they differ only in recomputation, sharding or instances.
bool same_sizes(const Estimated& one, const Estimated& other) {
  JobLayout layout = one.layout;
  layout.recompute = other.layout.recompute;
  layout.sharding = other.layout.sharding;
  layout.instances = other.layout.instances;
  return layout == other.layout;
}

class Search {
 public:
  Search(const std::function<Config(const std::vector<std::string>&)>& load,
         const LayoutSearchOptions& options, const Machine& machine)
      : load_(load),
        options_(options),
        machine_(machine),
        config_(load({})),
        estimator_(config_, options.space.world_size, machine) {}

  LayoutSearch run() {
    check_shared_cores(machine_, options_.space.world_size);
    const auto begin = std::chrono::steady_clock::now();
    std::vector<Estimated> all = estimates();
    std::vector<Estimated> fitting = next_that_fit(all);
    result_.search_s =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    for (; !fitting.empty(); fitting = next_that_fit(all))
      for (const Estimated& one : fitting)
        if (simulate(one)) taken_.push_back(one);
    vary();
    sort();
    if (result_.best.size() > options_.num_best)
      result_.best.erase(result_.best.begin() + static_cast<std::ptrdiff_t>(options_.num_best),
                         result_.best.end());
    return std::move(result_);
  }

 private:
  std::vector<Estimated> estimates() {
    std::vector<Estimated> all;
    std::string reason;  // of the first layout that is not supported
    result_.looked_at = visit_layouts(config_, options_.space, [&](const JobLayout& layout) {
      const std::string& problem = problem_of(layout);
      if (problem.empty()) all.push_back({layout, estimator_.seconds(layout)});
      if (reason.empty()) reason = problem;
    });
    require<ConfigError>(!all.empty() || reason.empty(), "{}", reason);
    result_.legal = static_cast<int64_t>(all.size());
    if (all.empty()) note_why_illegal();
    std::stable_sort(all.begin(), all.end(),
                     [](const auto& a, const auto& b) { return a.seconds < b.seconds; });
    return all;
  }

  void note_why_illegal() {
    try {
      check_layout(config_, options_.space.world_size);
    } catch (const Error& error) {
      result_.why_illegal = error.what();
    }
  }

  /// What check_supported() says; empty if nothing. Of a layout only the stages matter to it.
  const std::string& problem_of(const JobLayout& layout) {
    const auto [known, is_new] = problems_.try_emplace({layout.pipeline, layout.chunks});
    if (!is_new) return known->second;
    try {
      check_supported(with_layout(config_, layout));
    } catch (const Error& error) {
      known->second = error.what();
    }
    return known->second;
  }

  /// As many of the best layouts that fit as are still to be simulated.
  std::vector<Estimated> next_that_fit(std::vector<Estimated>& all) {
    const auto taken = static_cast<int64_t>(taken_.size());
    const int64_t wanted = std::min(options_.num_simulated - taken,
                                    kMostTries * options_.num_simulated - result_.simulated);
    std::vector<Estimated> fitting;
    for (Estimated& one : all) {
      if (static_cast<int64_t>(fitting.size()) >= wanted) break;
      const auto alike = [&](const Estimated& other) { return same_sizes(one, other); };
      if (one.passed || std::count_if(taken_.begin(), taken_.end(), alike) +
                                std::count_if(fitting.begin(), fitting.end(), alike) >=
                            kMostAlike)
        continue;
      one.passed = true;
      if (estimator_.least_bytes(one.layout) <= options_.memory_bytes &&
          fits(with_layout(config_, one.layout)))
        fitting.push_back(one);
      else
        ++result_.too_large;
    }
    return fitting;
  }

  /// visit_layouts() has not seen variations.
  bool is_legal(const JobLayout& layout) const {
    try {
      const Config config = with_layout(config_, layout);
      validate(config);
      check_supported(config);
      check_layout(config, options_.space.world_size);
      return true;
    } catch (const Error&) {
      return false;
    }
  }

  bool fits(const Config& config) const {
    try {
      return fits_memory(config, options_.space.world_size, options_.memory_bytes);
    } catch (const Error&) {
      return false;
    }
  }

  /// Whether it takes its place among the best.
  bool simulate(const Estimated& one) {
    const bool known =
        std::any_of(result_.best.begin(), result_.best.end(),
                    [&](const SimulatedLayout& other) { return other.layout == one.layout; });
    if (known) return false;
    SimulatedLayout simulated = {.layout = one.layout,
                                 .overrides = overrides_of(one.layout, config_),
                                 .estimated_s = one.seconds};
    if (options_.progress)
      options_.progress(fmt::format("{}", fmt::join(simulated.overrides, " ")));
    ++result_.simulated;
    try {
      const Config config = load_(simulated.overrides);
      const JobProgram job = record_job(config, options_.space.world_size, /*kernels=*/true);
      const OrderVerdict verdict = prove_order(job);
      if (!verdict.ok()) fail<Error>("{}", verdict.to_string());
      simulated.time = simulate_step(job, machine_);
      const std::vector<int64_t> peaks = recorded_peaks(job);
      simulated.peak_bytes = *std::max_element(peaks.begin(), peaks.end());
      require<Error>(static_cast<double>(simulated.peak_bytes) <= options_.memory_bytes,
                     "memory: found {} bytes as recorded, allowed: at most {:.0f}",
                     simulated.peak_bytes, options_.memory_bytes);
    } catch (const Error& error) {
      result_.refused.push_back({simulated.overrides, error.what()});
      return false;
    }
    result_.best.push_back(std::move(simulated));
    return true;
  }

  void sort() {
    std::stable_sort(result_.best.begin(), result_.best.end(),
                     [](const auto& a, const auto& b) { return a.time.step_s < b.time.step_s; });
  }

  /// Simulates other schedules and bucket sizes of the fastest layouts.
  void vary() {
    sort();
    std::vector<Estimated> variations;
    for (size_t i = 0; i < std::min(kVaried, result_.best.size()); ++i) {
      const SimulatedLayout& one = result_.best[i];
      JobLayout other = one.layout;
      if (may_vary("parallel.pipeline_schedule") && other.pipeline > 1 && other.chunks == 1) {
        other.schedule = PipelineScheduleFamily::zb_h1;
        variations.push_back({other, one.estimated_s});
        other = one.layout;
      }
      if (!may_vary("ddp.bucket_size") || config_.ddp.num_buckets) continue;
      other.bucket_size = bucket_size_of(one);
      variations.push_back({other, one.estimated_s});
    }
    for (const Estimated& variation : variations)
      if (is_legal(variation.layout) && fits(with_layout(config_, variation.layout)))
        (void)simulate(variation);
    // Some variations change nothing, such as bucket sizes of sharded parameters.
    const auto changes_nothing = [&](const SimulatedLayout& one) {
      return std::any_of(result_.best.begin(), result_.best.end(), [&](const auto& other) {
        return is_variation_of(one.layout, other.layout) && one.time.step_s == other.time.step_s;
      });
    };
    std::vector<SimulatedLayout> kept;
    std::copy_if(result_.best.begin(), result_.best.end(), std::back_inserter(kept),
                 [&](const SimulatedLayout& one) { return !changes_nothing(one); });
    result_.best = std::move(kept);
  }

  bool is_variation_of(JobLayout layout, const JobLayout& other) const {
    if (layout == other) return false;
    layout.schedule = other.schedule;
    layout.bucket_size = config_.ddp.bucket_size;
    return layout == other;
  }

  bool may_vary(const char* field) const {
    const std::vector<std::string>& kept = options_.space.kept;
    return std::find(kept.begin(), kept.end(), field) == kept.end();
  }

  /// The bucket size that gives a few buckets.
  int64_t bucket_size_of(const SimulatedLayout& one) const {
    int64_t most = 0;
    for (const StageMemory& stage :
         plan_memory(load_(one.overrides), options_.space.world_size).stages)
      most = std::max(most, stage.parameters);
    return std::max<int64_t>(1, most / kFewBuckets);
  }

  const std::function<Config(const std::vector<std::string>&)>& load_;
  const LayoutSearchOptions& options_;
  const Machine& machine_;
  const Config config_;
  LayoutEstimator estimator_;
  std::map<std::pair<int64_t, int64_t>, std::string> problems_;  ///< by stages and chunks
  std::vector<Estimated> taken_;  ///< simulated, apart from variations and what was refused
  LayoutSearch result_;
};

}  // namespace

LayoutSearch search_layouts(const std::function<Config(const std::vector<std::string>&)>& load,
                            const LayoutSearchOptions& options, const Machine& machine) {
  return Search(load, options, machine).run();
}

}  // namespace lockstep
