#include "lockstep/tests/support/device/device_ranks.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <latch>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/backends.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/communicator.h"
#include "lockstep/parallel_state/process_group_state.h"
#include "lockstep/tests/device/lagging_tests.h"
#include "lockstep/tests/support/device/device_streams.h"
#include "lockstep/tests/support/device/nccl_rules_backend.h"
#include "lockstep/tests/support/launch.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep::testing {
namespace {

at::Tensor on_device(const ParallelState& state, int64_t numel, double value) {
  return at::full({numel}, value, at::kFloat).to(state.device());
}

TEST(DeviceRanks, TheLibrarysCollectivesRunOnTheDevices) {
  const auto rules = std::make_shared<NcclRules>();
  run_device_ranks(4,
                   [](const ParallelState& state) {
                     EXPECT_EQ(state.device(), lagging_device(static_cast<int>(state.rank())));
                     const at::Tensor x = on_device(state, 8, static_cast<double>(state.rank()));
                     all_reduce(state.world(), x, ReduceOp::sum, "x").wait();
                     EXPECT_TRUE(at::equal(x.cpu(), at::full({8}, 6, at::kFloat)));
                     const at::Tensor on_host = at::ones({2});
                     all_reduce(state.world(), on_host, ReduceOp::sum, "on host").wait();
                     EXPECT_TRUE(at::equal(on_host, at::full({2}, 4, at::kFloat)));
                   },
                   {.rules = rules});
  for (int64_t rank = 0; rank < 4; ++rank) {
    const auto calls = rules->counts(rank).calls;
    ASSERT_EQ(calls.size(), 1U);
    EXPECT_EQ(calls.at("world[0, 1, 2, 3]").at("allreduce"), (NcclCalls{1, 32}));
  }
}

TEST(DeviceRanks, ARankThatThrowsReleasesTheOthersFromTheirDevices) {
  const auto run = [] {
    run_device_ranks(3, [](const ParallelState& state) {
      const ProcessGroup world = state.world();
      const at::Tensor x = on_device(state, 4, 1);
      all_reduce(world, x, ReduceOp::sum, "x").wait();
      if (state.rank() == 1) throw std::out_of_range("rank 1 has had enough");
      all_reduce(world, x, ReduceOp::sum, "y").wait();
      x.cpu();
    });
  };
  EXPECT_TRUE(throws_with<std::out_of_range>(run, "rank 1 has had enough"));
}

TEST(DeviceRanks, TheErrorsOfTheRanksAreTheirMessages) {
  const auto errors = errors_of_device_ranks(3, [](const ParallelState& state) {
    const at::Tensor x = on_device(state, 4, 1);
    all_reduce(state.world(), x, ReduceOp::sum, "x").wait();
    x.cpu();
    if (state.rank() != 1) throw std::out_of_range("enough of " + std::to_string(state.rank()));
  });
  EXPECT_EQ(errors, (std::vector<std::string>{"enough of 0", "", "enough of 2"}));
}

TEST(DeviceRanks, AnErrorOfADeviceIsTheErrorOfTheRun) {
  const auto run = [] {
    run_device_ranks(2, [](const ParallelState& state) {
      if (state.rank() == 1)
        enqueue(current_stream(state.device().index()), "a kernel",
                [] { throw std::runtime_error("out of its bounds"); });
    });
  };
  EXPECT_TRUE(
      throws_with<std::runtime_error>(run, "device of rank 1: a kernel: out of its bounds"));
  EXPECT_EQ(device_error(1), std::nullopt);
}

TEST(DeviceRanks, AnOverdueWorkIsTheError) {
  const auto run = [] {
    run_device_ranks(2, [](const ParallelState& state) {
      const ProcessGroup world = state.world();
      const at::Tensor x = on_device(state, 4, 1);
      all_reduce(world, x, ReduceOp::sum, "x").wait();
      const auto& c10d = world.shared_state()->communicator->c10d();
      c10d->getBackend(state.device().type())->setTimeout(std::chrono::milliseconds(300));
      if (state.rank() == 1) all_reduce(world, x, ReduceOp::sum, "left out by rank 0").wait();
      x.cpu();
    });
  };
  EXPECT_TRUE(throws_with<std::runtime_error>(run, "NCCL's watchdog: rank 1"));
}

TEST(DeviceRanks, HostsThatBlockAtTheDeadlineAreNamed) {
  const auto run = [] {
    run_device_ranks(2,
                     [](const ParallelState& state) {
                       const at::Tensor x = on_device(state, 4, 1);
                       send(state.world(), x, 1 - state.rank(), "both send").wait();
                     },
                     {.timeout = std::chrono::seconds(60), .deadline = std::chrono::seconds(3)});
  };
  EXPECT_TRUE(
      throws_with<std::runtime_error>(run, "rank 0, group world[0, 1], first send, 0 -> 1"));
}

TEST(DeviceRanks, EachRankHasADeviceOfItsOwn) {
  EXPECT_TRUE(throws_with<UsageError>([] { run_device_ranks(17, [](const ParallelState&) {}); },
                                      "found 17 ranks, allowed: 1 for each of 16 devices"));
}

TEST(DeviceRanks, RanksThatShareADeviceDoNotWaitForEachOthersStreams) {
  run_device_ranks(4,
                   [](const ParallelState& state) {
                     EXPECT_EQ(state.device(), lagging_device(static_cast<int>(state.rank() / 2)));
                     const at::Tensor x = on_device(state, 8, static_cast<double>(state.rank()));
                     for (int i = 0; i < 3; ++i)
                       all_reduce(state.world(), x, ReduceOp::sum, "x").wait();
                     EXPECT_TRUE(at::equal(x.cpu(), at::full({8}, 6 * 4 * 4, at::kFloat)));
                   },
                   {.ranks_per_device = 2});
}

/// With NCCL's name: once it was aborted it stays until the process ends, as its store does.
class BackendThatStays : public c10d::Backend {
 public:
  explicit BackendThatStays(const BackendSpec& spec)
      : Backend(spec.rank, static_cast<int>(spec.ranks.size())), store_(spec.store) {
    store_->set(std::to_string(spec.rank), "here");
  }
  const std::string getBackendName() const override { return "nccl"; }
  void abort() override {}
  void shutdown() override {}

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

ParallelState rank_with_backend_that_stays(int rank, int port, bool own_store) {
  ParallelStateOptions options;
  options.sizes.world_size = 2;
  options.device = lagging_device(rank);
  options.device_backend_factory = [](const BackendSpec& spec, c10::Device /*device*/) {
    return c10::make_intrusive<BackendThatStays>(spec);
  };
  if (!own_store) return {environment_of(rank, 2, port), options};
  c10d::TCPStoreOptions server;
  server.port = static_cast<uint16_t>(port);
  server.isServer = rank == 0;
  return {c10::make_intrusive<c10d::TCPStore>("127.0.0.1", server), rank, options};
}

TEST(DeviceRanks, AnAbortedBackendKeepsNoServerOfTheStoreAlive) {
  use_lagging_device();
  for (const bool own_store : {false, true}) {
    const int port = free_port();
    std::latch connected(2), left(2);
    const auto be_rank = [&](int rank) {
      {
        const ParallelState state = rank_with_backend_that_stays(rank, port, own_store);
        const ProcessGroup world = state.world();
        connected.arrive_and_wait();
        state.post_failure("out of cheese");
      }
      left.arrive_and_wait();
    };
    std::thread other(be_rank, 1);
    be_rank(0);
    other.join();
    const int socket = bound_socket("127.0.0.1", port, false);
    EXPECT_EQ(::listen(socket, 1), 0) << own_store;
    ::close(socket);
  }
}

TEST(DeviceRanks, AReduceScatterWithAFactorLeavesItsInputAlone) {
  run_device_ranks(2, [](const ParallelState& state) {
    const at::Tensor mine = at::arange(6, at::kFloat) + state.rank();
    const at::Tensor sum = (2 * at::arange(6, at::kFloat) + 1).narrow(0, 3 * state.rank(), 3) / 2;
    Reduction halves(ReduceOp::sum, 1, 2);
    for (const bool consumes : {false, true}) {
      halves.consumes_input = consumes;
      const at::Tensor input = mine.to(state.device()), output = on_device(state, 3, 0);
      reduce_scatter(state.world(), output, input, halves, "apart").wait();
      EXPECT_TRUE(at::equal(output.cpu(), sum));
      if (!consumes) {
        EXPECT_TRUE(at::equal(input.cpu(), mine));
      }
      const at::Tensor whole = mine.to(state.device());
      const at::Tensor own = whole.narrow(0, 3 * state.rank(), 3);
      reduce_scatter(state.world(), own, whole, halves, "in place").wait();
      EXPECT_TRUE(at::equal(own.cpu(), sum));
    }
  });
}

TEST(DeviceRanks, AGatherThatWasWaitedForKeepsNoMemoryWhileTheDeviceIsHeldUp) {
  run_device_ranks(2, [](const ParallelState& state) {
    const c10::DeviceIndex device = state.device().index();
    const at::Tensor mine = on_device(state, 1000, static_cast<double>(state.rank()));
    all_reduce(state.world(), mine, ReduceOp::sum, "first").wait();
    mine.cpu();
    const int64_t before = device_bytes(device).live;
    const Gate gate(current_stream(device));
    for (int i = 0; i < 20; ++i) {
      const at::Tensor all = at::empty({2000}, mine.options());
      all_gather(state.world(), all, mine, "activations").wait();
      EXPECT_EQ(all.storage().use_count(), 1U);
    }
    EXPECT_EQ(device_bytes(device).live, before);
  });
}

/// As in NCCL's watchdog, the works that have ended stay in the backend until the next launch.
TEST(DeviceRanks, AnAbortedBackendThatStaysKeepsNoTensorsOfWorksThatNobodyWaitedFor) {
  use_lagging_device();
  const auto rules = std::make_shared<NcclRules>();
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::mutex mutex;
  std::vector<c10::intrusive_ptr<c10d::Backend>> stay;
  const auto be_rank = [&](int rank) {
    ParallelStateOptions options;
    options.sizes.world_size = 2;
    options.device = lagging_device(rank);
    options.device_backend_factory = [&](const BackendSpec& spec, c10::Device device) {
      const auto backend = make_nccl_rules_backend(spec, device, rules);
      const std::lock_guard<std::mutex> lock(mutex);
      return stay.emplace_back(backend);
    };
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> gradients;
    {
      const ParallelState state(store, rank, options);
      const at::Tensor x = on_device(state, 1000, 1);
      gradients = x.storage().getWeakStorageImpl();
      all_reduce(state.world(), x, ReduceOp::sum, "first").wait();
      x.cpu();
      if (rank == 1) state.post_failure("out of cheese");
      if (rank == 0) (void)all_reduce(state.world(), x, ReduceOp::sum, "gradients");
    }
    EXPECT_TRUE(gradients->expired()) << "rank " << rank;
  };
  std::thread other(be_rank, 1);
  be_rank(0);
  other.join();
  EXPECT_EQ(stay.size(), 2U);
  stay.clear();
  wait_for_all_streams();
}

}  // namespace
}  // namespace lockstep::testing
