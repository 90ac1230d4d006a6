#include "lockstep/tests/support/device/device_ranks.h"

#include <condition_variable>
#include <stdexcept>
#include <thread>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "lockstep/core/check.h"
#include "lockstep/tests/support/device/device_streams.h"
#include "lockstep/tests/support/device/nccl_rules_backend.h"

namespace lockstep::testing {
namespace {

/// Errors outside of the ranks' own code.
class Mishaps {
 public:
  void add(const std::string& what) {
    const std::lock_guard<std::mutex> lock(mutex_);
    text_ += (text_.empty() ? "" : "\n") + what;
  }
  void throw_any() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!text_.empty()) throw std::runtime_error(text_);
  }

 private:
  std::mutex mutex_;
  std::string text_;
};

/// Aborts a job that has not ended by its deadline.
class Deadline {
 public:
  Deadline(NcclRules& rules, std::chrono::milliseconds after, Mishaps& mishaps)
      : thread_([this, &rules, after, &mishaps] {
          std::unique_lock<std::mutex> lock(mutex_);
          if (changed_.wait_for(lock, after, [this] { return done_; })) return;
          mishaps.add(fmt::format("the ranks have not ended within {} ms; hosts that block: {}",
                                  after.count(), rules.blocked_hosts()));
          rules.abort_all();
        }) {}
  ~Deadline() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      done_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_;
};

int device_of(int64_t rank, const DeviceRankOptions& options) {
  return static_cast<int>(rank / options.ranks_per_device);
}

RankThreadOptions thread_options(const DeviceRankOptions& options) {
  RankThreadOptions result;
  result.sizes = options.sizes;
  result.timeout = options.timeout;
  result.log = options.log;
  result.observer = options.observer;
  result.adjust = [&options](int64_t rank, ParallelStateOptions& state) {
    state.device = lagging_device(device_of(rank, options));
    state.device_backend_factory = [&options](const BackendSpec& spec, c10::Device device) {
      return make_nccl_rules_backend(spec, device, options.rules);
    };
  };
  return result;
}

void add_device_errors(int64_t world, const DeviceRankOptions& options, Mishaps& mishaps) {
  bool any = false;
  for (int64_t rank = 0; rank < world; rank += options.ranks_per_device)
    if (const auto error = device_error(device_of(rank, options))) {
      mishaps.add(fmt::format("device of rank {}: {}", rank, *error));
      any = true;
    }
  if (any) clear_device_errors();
}

/// Fills in unset options.
void prepare(int64_t world, DeviceRankOptions& options, const std::shared_ptr<Mishaps>& mishaps) {
  require<UsageError>(
      options.ranks_per_device >= 1 && world <= options.device.devices * options.ranks_per_device,
      "device ranks: found {} ranks, allowed: {} for each of {} devices", world,
      options.ranks_per_device, options.device.devices);
  use_lagging_device(options.device);
  if (!options.rules) options.rules = std::make_shared<NcclRules>();
  if (options.rules->on_timeout) return;
  options.rules->on_timeout = [mishaps, rules = options.rules.get()](const std::string& message) {
    mishaps->add(message);
    rules->abort_all();
  };
}

RankBody guarded(const RankBody& body, const DeviceRankOptions& options) {
  return [&](const ParallelState& state) {
    if (options.ranks_per_device > 1) exchange_current_stream(new_stream(state.device().index()));
    try {
      body(state);
    } catch (...) {
      if (options.abort_on_error) options.rules->abort_all();
      throw;
    }
  };
}

}  // namespace

void run_device_ranks(int64_t world, const RankBody& body, DeviceRankOptions options) {
  const auto mishaps = std::make_shared<Mishaps>();
  prepare(world, options, mishaps);
  std::exception_ptr first;
  {
    const Deadline deadline(*options.rules, options.deadline, *mishaps);
    try {
      run_ranks(world, guarded(body, options), thread_options(options));
    } catch (...) {
      first = std::current_exception();
    }
    wait_for_all_streams();
  }
  add_device_errors(world, options, *mishaps);
  mishaps->throw_any();
  if (first) std::rethrow_exception(first);
}

std::vector<std::string> errors_of_device_ranks(int64_t world, const RankBody& body,
                                                DeviceRankOptions options) {
  const auto mishaps = std::make_shared<Mishaps>();
  prepare(world, options, mishaps);
  std::vector<std::string> errors;
  {
    const Deadline deadline(*options.rules, options.deadline, *mishaps);
    errors = errors_of_ranks(world, guarded(body, options), thread_options(options));
    wait_for_all_streams();
  }
  mishaps->throw_any();
  return errors;
}

}  // namespace lockstep::testing
