#pragma once

#include <gtest/gtest.h>

#include <semaphore>
#include <string>
#include <thread>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/tests/support/device/device_streams.h"
#include "lockstep/tests/support/device/lagging_device.h"
#include "lockstep/tests/support/device/nccl_rules_backend.h"

/// Groups of bare backends with NCCL's rules: one thread and one device per rank.
namespace lockstep::testing {

using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

inline at::Tensor constant(int64_t numel, double value) {
  return at::full({numel}, value, at::kFloat);
}

/// Small integers in double, so sums are exact in every dtype.
inline at::Tensor whole_numbers(int64_t rank, int64_t numel) {
  return (at::arange(numel, at::kDouble) * 7 + rank * 3).remainder(11);
}

/// One rank of a group.
struct NcclRank {
  int rank, size;
  c10::Device device;
  c10::intrusive_ptr<c10d::Backend> backend;
  NcclRules& rules;

  /// Copies a host tensor to the device.
  at::Tensor put(const at::Tensor& host) const { return host.to(device); }
  at::Tensor filled(int64_t numel, double value, at::ScalarType dtype = at::kFloat) const {
    return put(at::full({numel}, value, dtype));
  }
  /// Fresh memory, which holds poison.
  at::Tensor fresh(int64_t numel, at::ScalarType dtype = at::kFloat) const {
    return at::empty({numel}, at::TensorOptions(dtype).device(device));
  }

  WorkPtr all_reduce(at::Tensor tensor) const {
    Tensors one = {std::move(tensor)};
    return backend->allreduce(one);
  }
  WorkPtr broadcast(at::Tensor tensor, int64_t root) const {
    Tensors one = {std::move(tensor)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return backend->broadcast(one, options);
  }
  WorkPtr all_gather(at::Tensor output, at::Tensor input) const {
    return backend->_allgather_base(output, input);
  }
  WorkPtr send(at::Tensor tensor, int to, int tag = 0) const {
    Tensors one = {std::move(tensor)};
    return backend->send(one, to, tag);
  }
  WorkPtr receive(at::Tensor tensor, int from, int tag = 0) const {
    Tensors one = {std::move(tensor)};
    return backend->recv(one, from, tag);
  }
  /// Works that are launched from now on time out after 300 ms.
  void give_up_soon() const { backend->setTimeout(std::chrono::milliseconds(300)); }
  /// Creates the group's communicator and waits for it on the host.
  void meet() const { backend->barrier()->wait(); }
  /// The host waits for the current stream.
  void synchronize() const { current_stream(device.index()).synchronize(); }
};

struct NcclJobOptions {
  uint64_t seed = 1;
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::shared_ptr<NcclRules> rules = std::make_shared<NcclRules>();
  int first_device = 0;
};

/// Runs `body` on each rank of a group "test" and then shuts the group down. Returns what each rank
/// threw, "" for nothing. A rank that throws aborts the job.
inline std::vector<std::string> errors_of_job(int size, const std::function<void(NcclRank&)>& body,
                                              NcclJobOptions options = {}) {
  use_lagging_device({.seed = options.seed});
  std::vector<std::string> errors(static_cast<size_t>(size));
  const auto be_rank = [&](int rank) {
    BackendSpec spec;
    spec.store = c10::make_intrusive<c10d::PrefixStore>("group", options.store);
    spec.group_name = "test";
    for (int member = 0; member < size; ++member) spec.ranks.push_back(member);
    spec.rank = rank;
    spec.timeout = options.timeout;
    const c10::Device device = lagging_device(options.first_device + rank);
    set_current_device(device.index());
    NcclRank self{rank, size, device, make_nccl_rules_backend(spec, device, options.rules),
                  *options.rules};
    try {
      body(self);
      if (self.backend) self.backend->shutdown();
    } catch (const std::exception& error) {
      errors[static_cast<size_t>(rank)] = error.what();
      options.rules->abort_all();
    }
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) threads.emplace_back(be_rank, rank);
  for (std::thread& thread : threads) thread.join();
  return errors;
}

/// The same, but no rank may throw.
inline void run_job(int size, const std::function<void(NcclRank&)>& body,
                    NcclJobOptions options = {}) {
  for (const std::string& error : errors_of_job(size, body, std::move(options)))
    EXPECT_EQ(error, "");
}

/// Collects what watchdogs report. Aborts the job after `abort_after` messages.
struct OverdueWorks {
  std::mutex mutex;
  std::vector<std::string> messages;

  NcclJobOptions options(int abort_after) {
    NcclJobOptions result;
    result.rules->on_timeout = [this, abort_after,
                                rules = result.rules.get()](const std::string& message) {
      bool all = false;
      {
        const std::lock_guard<std::mutex> lock(mutex);
        messages.push_back(message);
        all = static_cast<int>(messages.size()) == abort_after;
      }
      if (all) rules->abort_all();
    };
    return result;
  }
};

/// Waits until `condition` holds, but for a minute at most.
inline ::testing::AssertionResult comes_true(const std::function<bool()>& condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline)
      return ::testing::AssertionFailure() << "not within a minute";
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return ::testing::AssertionSuccess();
}

}  // namespace lockstep::testing
