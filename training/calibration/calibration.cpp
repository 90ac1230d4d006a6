#include "lockstep/training/calibration.h"

#include <algorithm>
#include <array>
#include <barrier>
#include <exception>
#include <mutex>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "lockstep/core/check.h"
#include "lockstep/core/usable_cores.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/training/link_trials.h"
#include "lockstep/training/operator_trials.h"
#include "lockstep/training/step_trials.h"
#include "lockstep/training/stop_watch.h"

namespace lockstep {
namespace {

using Tensors = OperatorTrial::Tensors;

constexpr size_t kMostBytes = 48 << 20;  // of the operands of a trial: more than caches hold
constexpr int64_t kMostRanksOfACore = 16;
constexpr size_t kFewestSets = 2, kMostSets = 16;

size_t bytes_of(const Tensors& tensors) {
  size_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += tensor.nbytes();
  return bytes;
}

/// The time of one call of the operator, with other operands each time.
double operator_seconds(const OperatorTrial& trial, double seconds) {
  std::vector<Tensors> sets = {trial.make(c10::kCPU)};
  const size_t count =
      std::clamp(kMostBytes / std::max<size_t>(1, bytes_of(sets[0])), kFewestSets, kMostSets);
  while (sets.size() < count) sets.push_back(trial.make(c10::kCPU));
  size_t next = 0;
  const double each = median_seconds(seconds, [&] { trial.call(sets[next++ % sets.size()]); });
  return each / static_cast<double>(trial.num_calls);
}

/// The time of an operator that has almost nothing to do, without autograd.
double bare_call_seconds() {
  const at::Tensor a = at::zeros({1}), b = at::zeros({1});
  constexpr int kCalls = 100;
  return median_seconds(0.05,
                        [&] {
                          for (int i = 0; i < kCalls; ++i) at::add(a, b);
                        }) /
         kCalls;
}

/// The time to launch a kernel in a step; forward and backward launch one each.
double launch_seconds() {
  constexpr int kCalls = 100;
  const at::AutoGradMode with_grad(true);
  const at::Tensor x = at::ones({1}).set_requires_grad(true), factor = at::ones({1});
  return median_seconds(0.1,
                        [&] {
                          at::Tensor y = x;
                          for (int i = 0; i < kCalls; ++i) y = y.mul(factor);
                          y.backward();
                          x.mutable_grad() = at::Tensor();
                        }) /
         (2 * kCalls);
}

constexpr int64_t kHalfSize = 512;
constexpr double kHalfFlops = 2.0 * kHalfSize * kHalfSize * kHalfSize;

/// The rate of bf16 in products of 512 x 512 matrices.
double half_rate(double seconds) {
  const at::Tensor a = at::rand({kHalfSize, kHalfSize}).to(at::kBFloat16);
  return kHalfFlops / median_seconds(seconds, [&] { at::mm(a, a); });
}

/// The peak of which products of that size reach `rate`, with the shares of fp32.
double half_peak(Machine machine, double rate) {
  machine.half_flops_per_s = rate;
  const double planned =
      machine.seconds({.name = "product", .dtype = "BFloat16", .flops = kHalfFlops, .bytes = 0});
  return rate * planned * rate / kHalfFlops;
}

/// The times that one rank measures while the others do the same.
struct HostTimes {
  std::vector<double> operators = {}, steps = {};
  double bare_call = 0, launch = 0, half_rate = 0;
};

class HostTrials {
 public:
  HostTrials(const CalibrationOptions& options, const std::vector<OperatorTrial>& trials,
             int threads)
      : options_(options), trials_(trials), threads_(threads), together_(options.ranks) {}

  /// Returns averages over the ranks.
  HostTimes run() {
    std::vector<std::thread> ranks;
    for (int64_t rank = 0; rank < options_.ranks; ++rank)
      ranks.emplace_back([this, rank] { run_as(rank); });
    for (std::thread& rank : ranks) rank.join();
    if (error_) std::rethrow_exception(error_);
    return average_;
  }

 private:
  void run_as(int64_t rank) {
    at::set_num_threads(threads_);
    HostTimes times;
    try {
      for (const Config& config : step_trials())
        times.steps.push_back(step_seconds(config, options_.seconds_each));
    } catch (...) {
      keep_error();
    }
    const at::NoGradGuard no_grad;
    try {
      times.bare_call = bare_call_seconds();
      times.launch = launch_seconds();
      times.half_rate = half_rate(options_.seconds_each);
    } catch (...) {
      keep_error();
    }
    for (const OperatorTrial& trial : trials_) {
      together_.arrive_and_wait();
      if (rank == 0 && options_.progress) options_.progress(trial.name);
      double seconds = 0;
      try {
        seconds = operator_seconds(trial, options_.seconds_each);
      } catch (...) {
        keep_error();
      }
      times.operators.push_back(seconds);
    }
    add(times);
  }

  void keep_error() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!error_) error_ = std::current_exception();
  }

  void add(const HostTimes& times) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const double share = 1 / static_cast<double>(options_.ranks);
    add(average_.operators, times.operators, share);
    add(average_.steps, times.steps, share);
    average_.bare_call += share * times.bare_call;
    average_.launch += share * times.launch;
    average_.half_rate += share * times.half_rate;
  }

  static void add(std::vector<double>& sums, const std::vector<double>& terms, double share) {
    sums.resize(terms.size());
    for (size_t i = 0; i < terms.size(); ++i) sums[i] += share * terms[i];
  }

  const CalibrationOptions& options_;
  const std::vector<OperatorTrial>& trials_;
  int threads_;
  std::barrier<> together_;
  std::mutex mutex_;
  std::exception_ptr error_;
  HostTimes average_;
};

/// What another program adds to a time is gone from the lower of two, measured some seconds apart.
HostTimes lower(HostTimes one, const HostTimes& other) {
  const auto take = [](double& a, double b) { a = std::min(a, b); };
  for (size_t i = 0; i < one.operators.size(); ++i) take(one.operators[i], other.operators[i]);
  for (size_t i = 0; i < one.steps.size(); ++i) take(one.steps[i], other.steps[i]);
  take(one.bare_call, other.bare_call);
  take(one.launch, other.launch);
  one.half_rate = std::max(one.half_rate, other.half_rate);
  return one;
}

/// All measurements, those of links three times.
struct Measurements {
  HostTimes host = {};
  std::array<Machine::Link, 3> inside = {}, between = {};
};

/// Measures all, on all ranks of this host and at the same time on the other one, if there is one.
class Measuring {
 public:
  Measuring(const CalibrationOptions& options, const std::vector<OperatorTrial>& trials,
            int threads)
      : options_(options), trials_(trials), threads_(threads) {
    options_.seconds_each /= 2;  // operators are measured twice
    options_.ranks = std::min<int64_t>(options_.ranks, usable_cores());
  }

  Measurements run() {
    measure_links(0);
    result_.host = host_times();
    measure_links(1);
    result_.host = lower(std::move(result_.host), host_times());
    measure_links(2);
    return std::move(result_);
  }

 private:
  HostTimes host_times() const {
    meet();
    return HostTrials(options_, trials_, threads_).run();
  }

  void measure_links(size_t time) {
    meet();
    tell("collectives");
    result_.inside[time] = measure_inside_host(threads_);
    if (!options_.hosts) return;
    meet();
    tell("collectives between hosts");
    result_.between[time] = measure_between_hosts(*options_.hosts);
  }

  void meet() const {
    if (options_.hosts) barrier(options_.hosts->world(), "calibration");
  }

  void tell(const char* part) const {
    if (options_.progress) options_.progress(part);
  }

  CalibrationOptions options_;
  const std::vector<OperatorTrial>& trials_;
  int threads_;
  Measurements result_;
};

/// Medians of all numbers. Not the lower ones: ranks wait for each other, and so for what disturbs
/// either.
Machine::Link median_link(const std::array<Machine::Link, 3>& all) {
  Machine::Link result = all[0];
  const auto median = [&](auto number) {
    return median_of({number(all[0]), number(all[1]), number(all[2])});
  };
  for (size_t i = 0; i < result.collectives.size(); ++i)
    for (size_t k = 0; k < result.collectives[i].points.size(); ++k)
      result.collectives[i].points[k].seconds =
          median([&](const Machine::Link& link) { return link.collectives[i].points[k].seconds; });
  result.latency_s = median([](const Machine::Link& link) { return link.latency_s; });
  result.occupancy = median([](const Machine::Link& link) { return link.occupancy; });
  result.bytes_per_s = median([](const Machine::Link& link) { return link.bytes_per_s; });
  return result;
}

/// Work and times of each operator. Launches are counted separately, so the cost of every call is
/// subtracted; at least a tenth remains.
std::vector<Machine::Times> operator_times(const std::vector<OperatorTrial>& trials,
                                           const HostTimes& measured) {
  std::vector<Machine::Times> all;
  for (size_t i = 0; i < trials.size(); ++i) {
    if (all.empty() || all.back().name != trials[i].name)
      all.push_back({.name = trials[i].name, .dtype = "Float", .points = {}});
    std::vector<Machine::Point>& points = all.back().points;
    const double seconds =
        std::max(measured.operators[i] - measured.bare_call, measured.operators[i] / 10);
    if (points.empty() || trials[i].work > points.back().work)
      points.push_back({trials[i].work, seconds});
  }
  return all;
}

/// The highest rate of any point of these operators, in work per second.
double best_rate(const std::vector<Machine::Times>& all, std::initializer_list<const char*> names) {
  double best = 0;
  for (const Machine::Times& times : all)
    for (const char* name : names)
      if (times.name == name)
        for (const Machine::Point& point : times.points)
          best = std::max(best, point.work / point.seconds);
  return best;
}

/// Shares of `rate` at the sizes of an operator that represents others.
std::vector<Machine::Efficiency> shares_of(const std::vector<Machine::Times>& all, const char* name,
                                           double rate) {
  std::vector<Machine::Efficiency> shares;
  for (const Machine::Times& times : all)
    if (times.name == name)
      for (const Machine::Point& point : times.points)
        shares.push_back({point.work, std::min(1.0, point.work / point.seconds / rate)});
  if (!shares.empty()) shares.front().from = 0;
  std::reverse(shares.begin(), shares.end());
  return shares;
}

}  // namespace

Machine calibrate(const CalibrationOptions& options) {
  const int64_t cores = usable_cores();
  const int64_t most = cores > 1 && !options.hosts ? kMostRanksOfACore * cores : cores;
  require<ConfigError>(options.ranks >= 1 && options.ranks <= most,
                       "ranks of this host: found {}, allowed: 1 to {} with {} usable cores{}",
                       options.ranks, most, cores, options.hosts ? " and two hosts" : "");
  require<ConfigError>(!options.hosts || options.hosts->world().size() == 2,
                       "hosts to calibrate: found {}, allowed: 2, with one rank on each",
                       options.hosts ? options.hosts->world().size() : 0);
  const int before = at::get_num_threads();
  const int threads = std::clamp(static_cast<int>(cores / options.ranks), 1, before);
  const std::vector<OperatorTrial> trials = operator_trials();
  at::set_num_threads(threads);
  const Measurements measured = Measuring(options, trials, threads).run();
  Machine machine;
  machine.name = fmt::format("{} CPU ranks of {} threads", options.ranks, threads);
  machine.ranks_per_host = options.ranks;
  if (options.ranks > cores) {
    machine.name += fmt::format(" on {} cores", cores);
    machine.cores = cores;
  }
  machine.operators = operator_times(trials, measured.host);
  machine.wide_flops_per_s = best_rate(machine.operators, {"aten::mm", "aten::addmm"});
  machine.memory_bytes_per_s = best_rate(machine.operators, {"aten::add", "aten::mul"});
  machine.matrix = shares_of(machine.operators, "aten::mm", machine.wide_flops_per_s);
  machine.half_flops_per_s = half_peak(machine, measured.host.half_rate);
  machine.memory = shares_of(machine.operators, "aten::mul", machine.memory_bytes_per_s);
  machine.synchronous = true;
  machine.inside_host = median_link(measured.inside);
  if (options.hosts) machine.between_hosts = median_link(measured.between);
  machine.launch_s = launch_seconds_of(measured.host.steps, machine, measured.host.launch);
  at::set_num_threads(before);
  return machine;
}

}  // namespace lockstep
