// Launches and waits of a training step on a device: how often the host queues work on its device,
// and how often it waits for the device. Counted, not timed, on the asynchronous test device with a
// backend with NCCL's rules. The counts are for a step after the first, the maximum over the ranks.

#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/Parallel.h>

#include "lockstep/core/config_io.h"
#include "lockstep/tests/device/expert_layouts.h"
#include "lockstep/tests/support/device/device_ranks.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/run_setup.h"
#include "lockstep/training/trainer.h"

namespace lockstep::benchmarks {
namespace {

using testing::DeviceCounts;
using testing::DeviceLayout;

constexpr int kSteps = 3;

struct Counts {
  int64_t launches = 0, kernels = 0, waits = 0;
  std::map<std::string, int64_t> waits_by = {};
};

/// Takes the maximum over the ranks of each number.
void take_most(Counts& most, const DeviceCounts& found, int64_t kernels) {
  most.launches = std::max(most.launches, found.launches);
  most.kernels = std::max(most.kernels, kernels);
  most.waits = std::max(most.waits, found.waits);
  for (const auto& [cause, times] : found.waits_by)
    most.waits_by[cause] = std::max(most.waits_by[cause], times);
}

Counts counts_of_last_step(const DeviceLayout& layout, const std::string& text) {
  const Config config = parse_config(testing::kDeviceModel, "benchmark",
                                     testing::with({"data.path=" + text}, layout.overrides));
  testing::DeviceRankOptions options;
  options.sizes = parallel_options(config, c10::kCPU).sizes;
  options.rules = std::make_shared<testing::NcclRules>();
  options.device.delayed = 0;
  Counts most;
  std::mutex mutex;
  testing::run_device_ranks(
      layout.world,
      [&](const ParallelState& state) {
        Trainer trainer(config, state);
        for (int step = 1; step < kSteps; ++step) trainer.train_step();
        const DeviceCounts before = testing::device_counts(state.device().index());
        const int64_t kernels = options.rules->counts(state.rank()).kernels;
        trainer.train_step();
        const DeviceCounts after = testing::device_counts(state.device().index());
        const std::lock_guard<std::mutex> lock(mutex);
        take_most(most, after - before, options.rules->counts(state.rank()).kernels - kernels);
      },
      options);
  return most;
}

std::vector<DeviceLayout> chosen_layouts() {
  const std::vector<std::string> names = {
      "one_rank", "dp2_overlap", "dp2_sharded", "tp2_sp_dropout", "pp2", "pp4_interleaved",
      "cp2_p2p",  "experts",     "ep2",         "tp2_pp2_dp2"};
  std::vector<DeviceLayout> chosen;
  for (const auto& layouts : {testing::data_layouts(), testing::model_layouts(),
                              testing::expert_layouts(), testing::exchanged_layouts()})
    for (const DeviceLayout& layout : layouts)
      if (std::find(names.begin(), names.end(), layout.name) != names.end())
        chosen.push_back(layout);
  return chosen;
}

void print_counts(const DeviceLayout& layout, const Counts& counts) {
  std::string waits;
  for (const auto& [cause, times] : counts.waits_by)
    waits += (waits.empty() ? "" : ", ") + std::to_string(times) + " " + cause;
  std::printf("%-18s %6ld %9ld %12ld %6ld  %s\n", layout.name.c_str(), layout.world,
              counts.launches, counts.kernels, counts.waits, waits.c_str());
}

void print_all() {
  const testing::TemporaryFolder folder;
  const std::string text = folder.write("text", testing::synthetic_text());
  std::printf("A step on a device: 4 layers, 8 sequences in micro-batches of one\n");
  std::printf("%-18s %6s %9s %12s %6s  %s\n", "layout", "ranks", "launches", "NCCL kernels",
              "waits", "for");
  for (const DeviceLayout& layout : chosen_layouts())
    print_counts(layout, counts_of_last_step(layout, text));
}

}  // namespace
}  // namespace lockstep::benchmarks

int main() {
  at::set_num_threads(1);
  lockstep::prepare_rank_threads();
  lockstep::benchmarks::print_all();
}
