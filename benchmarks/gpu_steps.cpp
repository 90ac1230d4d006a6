#include <kineto/ActivityType.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include <c10/core/CachingDeviceAllocator.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include "lockstep/benchmarks/gpu_bench.h"
#include "lockstep/benchmarks/interleaved.h"
#include "lockstep/training/trainer.h"

namespace lockstep::benchmarks {
namespace {

using libkineto::ActivityType;
using torch::autograd::profiler::KinetoEvent;

constexpr int kSteps = 3;
constexpr size_t kKernelsTold = 20;
constexpr double kLongGapMs = 0.02;

void tell(const Json& line) {
  std::printf("%s\n", line.dump().c_str());
  std::fflush(stdout);
}

int64_t parameters_of(const Trainer& trainer) {
  int64_t count = 0;
  for (const at::Tensor& parameter : trainer.model().parameters()) count += parameter.numel();
  return count;
}

int64_t peak_bytes(c10::Device device) {
  if (device.is_cpu()) return 0;
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  return stats.allocated_bytes[0].peak;
}

/// The number of calls of one name and their milliseconds.
struct Sum {
  int64_t calls = 0;
  double ms = 0;

  void add(const KinetoEvent& event) {
    ++calls;
    ms += static_cast<double>(event.durationNs()) / 1e6;
  }
  Json json() const { return {{"calls", calls}, {"ms", ms}}; }
};

using Sums = std::map<std::string, Sum>;

Json json_of(const Sums& sums, size_t most = SIZE_MAX) {
  std::vector<std::pair<std::string, Sum>> sorted(sums.begin(), sums.end());
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.second.ms > b.second.ms; });
  if (sorted.size() > most) sorted.resize(most);
  Json result = Json::object();
  for (const auto& [name, sum] : sorted) result[name] = sum.json();
  return result;
}

struct Interval {
  uint64_t begin, end;
};

/// How long the device was busy and idle, between its first and its last work.
Json occupation(std::vector<Interval> work) {
  std::sort(work.begin(), work.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  double busy = 0, idle = 0, longest = 0;
  int64_t long_gaps = 0;
  uint64_t until = work.empty() ? 0 : work.front().begin;
  for (const Interval& one : work) {
    if (one.begin > until) {
      const double gap = static_cast<double>(one.begin - until) / 1e6;
      idle += gap;
      longest = std::max(longest, gap);
      if (gap > kLongGapMs) ++long_gaps;
    }
    const uint64_t begin = std::max(one.begin, until);
    if (one.end > begin) busy += static_cast<double>(one.end - begin) / 1e6;
    until = std::max(until, one.end);
  }
  return {{"busy_ms", busy},
          {"idle_ms", idle},
          {"longest_gap_ms", longest},
          {"gaps_over_20_us", long_gaps}};
}

Json report(const std::vector<KinetoEvent>& events) {
  Sums kernels, copies, launches, waits;
  std::vector<Interval> work;
  int64_t operators = 0;
  for (const KinetoEvent& event : events) {
    const auto type = static_cast<ActivityType>(event.activityType());
    const std::string name = event.name();
    const bool copy = type == ActivityType::GPU_MEMCPY || type == ActivityType::GPU_MEMSET;
    if (type == ActivityType::CPU_OP) ++operators;
    if (type == ActivityType::CONCURRENT_KERNEL) kernels[name].add(event);
    if (copy) copies[name].add(event);
    if (copy || type == ActivityType::CONCURRENT_KERNEL)
      work.push_back({event.startNs(), event.endNs()});
    if (type != ActivityType::CUDA_RUNTIME && type != ActivityType::CUDA_DRIVER) continue;
    if (name.find("Launch") != std::string::npos) launches[name].add(event);
    if (name.find("Synchronize") != std::string::npos) waits[name].add(event);
  }
  return {{"steps", kSteps},
          {"operators", operators},
          {"kernels", json_of(kernels, kKernelsTold)},
          {"distinct_kernels", kernels.size()},
          {"copies", json_of(copies)},
          {"launches", json_of(launches)},
          {"waits", json_of(waits)},
          {"device", occupation(std::move(work))}};
}

}  // namespace

void serve_steps(const Config& config, c10::Device device) {
  Trainer trainer(config, ParallelState::single_process(device));
  tell({{"parameters", parameters_of(trainer)}});
  for (int64_t steps = 0; std::cin >> steps;) {
    double loss = 0;
    const double seconds = seconds_of([&] {
      for (int64_t i = 0; i < steps; ++i) loss = trainer.train_step().lm_loss;
      synchronize(device);
    });
    tell({{"ms", seconds * 1e3 / static_cast<double>(steps)},
          {"loss", loss},
          {"peak_bytes", peak_bytes(device)}});
  }
}

Json profile_steps(const Config& config, c10::Device device) {
  namespace profiler = torch::profiler::impl;
  Trainer trainer(config, ParallelState::single_process(device));
  for (int i = 0; i < kSteps; ++i) trainer.train_step();
  synchronize(device);
  std::set<profiler::ActivityType> activities = {profiler::ActivityType::CPU};
  if (device.is_cuda()) activities.insert(profiler::ActivityType::CUDA);
  const profiler::ProfilerConfig options(profiler::ProfilerState::KINETO);
  torch::autograd::profiler::prepareProfiler(options, activities);
  torch::autograd::profiler::enableProfiler(options, activities, {at::RecordScope::FUNCTION});
  const double seconds = seconds_of([&] {
    for (int i = 0; i < kSteps; ++i) trainer.train_step();
    synchronize(device);
  });
  const auto result = torch::autograd::profiler::disableProfiler();
  Json profile = report(result->events());
  profile["ms_per_step"] = seconds * 1e3 / kSteps;
  return profile;
}

}  // namespace lockstep::benchmarks
