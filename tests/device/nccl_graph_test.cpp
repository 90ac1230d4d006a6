#include "lockstep/kernels/device_graph.h"
#include "lockstep/tests/device/lagging_graphs.h"
#include "lockstep/tests/device/nccl_job.h"
#include "lockstep/tests/support/throws_with.h"

// Collectives in graphs: values, order, counts, and what NCCL and c10d refuse.

namespace lockstep::testing {
namespace {

at::Tensor input_of(int rank, int round, int64_t numel = 6) {
  return (at::arange(numel, at::kFloat) + static_cast<float>(10 * round)) * (rank + 1);
}

/// The sum of all ranks' inputs.
at::Tensor sum_of(int size, int round, int64_t numel = 6) {
  at::Tensor sum = input_of(0, round, numel);
  for (int rank = 1; rank < size; ++rank) sum += input_of(rank, round, numel);
  return sum;
}

TEST(NcclGraphs, AReplaySumsWhatTheRanksHaveThen) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed)
    run_job(
        2,
        [](NcclRank& self) {
          self.meet();
          const at::Tensor x = self.filled(6, 0);
          at::Tensor y;
          Graph graph = captured(self.device.index(), [&] {
            y = x * 2;
            self.all_reduce(y)->wait();
            y.add_(1);
          });
          const NcclCounts before = self.rules.counts(self.rank);
          EXPECT_EQ(before.calls.at("test").count("allreduce"), 0) << "nothing has run";
          for (int round = 1; round <= 3; ++round) {
            x.copy_(input_of(self.rank, round));
            graph->replay();
            EXPECT_TRUE(at::equal(y.cpu(), sum_of(2, round) * 2 + 1)) << y.cpu();
          }
          const NcclCounts after = self.rules.counts(self.rank);
          EXPECT_EQ(after.calls.at("test").at("allreduce"), (NcclCalls{3, 3 * 6 * 4}));
          EXPECT_EQ(after.kernels - before.kernels, 3);
          EXPECT_EQ(device_counts(self.device.index()).replays, 3);
          graph.reset();
        },
        [&] {
          reset_device_counts();
          return NcclJobOptions{.seed = seed};
        }());
}

TEST(NcclGraphs, CollectivesOfAGraphGoBesideItsKernels) {
  run_job(2, [](NcclRank& self) {
    self.meet();
    const at::Tensor x = self.filled(6, 0), other = self.filled(6, 0);
    at::Tensor sum, gathered;
    Graph graph = captured(self.device.index(), [&] {
      sum = x * 1;
      const WorkPtr reducing = self.all_reduce(sum);
      const at::Tensor beside = at::tanh(other);
      reducing->wait();
      gathered = self.fresh(12);
      const WorkPtr gathering = self.all_gather(gathered, sum + beside);
      gathering->wait();
    });
    for (int round = 1; round <= 5; ++round) {
      x.copy_(input_of(self.rank, round));
      other.fill_(round * 0.1);
      graph->replay();
      const at::Tensor expected =
          sum_of(2, round) + at::tanh(at::full({6}, static_cast<float>(round * 0.1)));
      EXPECT_TRUE(at::equal(gathered.cpu(), at::cat({expected, expected}))) << gathered.cpu();
    }
    graph.reset();
  });
}

TEST(NcclGraphs, MessagesOfABatchAreReplayed) {
  run_job(2, [](NcclRank& self) {
    const int peer = 1 - self.rank;
    const at::Tensor sent = self.filled(6, 0), received = self.fresh(6);
    const auto exchange = [&] {
      self.backend->startCoalescing();
      self.send(sent, peer);
      self.receive(received, peer);
      self.backend->endCoalescing()->wait();
    };
    exchange();  // connects the pair
    Graph graph = captured(self.device.index(), exchange);
    for (int round = 1; round <= 5; ++round) {
      sent.copy_(input_of(self.rank, round));
      graph->replay();
      EXPECT_TRUE(at::equal(received.cpu(), input_of(peer, round))) << round;
    }
    EXPECT_EQ(self.rules.counts(self.rank).calls.at("test").at("send"), (NcclCalls{6, 6 * 24}));
    graph.reset();
  });
}

TEST(NcclGraphs, ACommunicatorKeepsTheOrderOfReplaysAndOtherLaunches) {
  for (uint64_t seed = 1; seed <= 5; ++seed)
    run_job(
        2,
        [](NcclRank& self) {
          self.meet();
          self.backend->setTimeout(std::chrono::seconds(20));
          const c10::Stream other = new_stream(self.device.index());
          const at::Tensor x = self.filled(6, 1), y = self.filled(3, self.rank);
          Graph graph = captured(self.device.index(), [&] { self.all_reduce(x)->wait(); });
          self.synchronize();
          for (int round = 0; round < 5; ++round) {
            std::optional<Gate> gate;
            if (self.rank == round % 2) gate.emplace(current_stream(self.device.index()));
            graph->replay();
            const c10::StreamGuard guard(other);  // only NCCL orders it after the replay
            const WorkPtr reducing = self.all_reduce(y);
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
            if (gate) gate->release();
            reducing->wait();
          }
          self.synchronize();
          EXPECT_TRUE(at::equal(x.cpu(), constant(6, 32)));
          const c10::StreamGuard guard(other);
          EXPECT_TRUE(at::equal(y.cpu(), constant(3, 16)));
          graph.reset();
        },
        [&] {
          NcclJobOptions options{.seed = seed};
          options.rules->on_timeout = [rules = options.rules.get()](const std::string& message) {
            ADD_FAILURE() << message;
            rules->abort_all();
          };
          return options;
        }());
}

/// The error of rank 0, of two, when it calls `body` in a capture.
std::string error_in_capture(const std::function<void(NcclRank&)>& before,
                             const std::function<void(NcclRank&)>& body) {
  std::string message;
  run_job(2, [&](NcclRank& self) {
    before(self);
    if (self.rank != 0) return;
    try {
      captured(self.device.index(), [&] { body(self); });
    } catch (const c10::Error& error) {
      message = error.what_without_backtrace();
    }
  });
  return message;
}

TEST(NcclGraphs, WhatBlocksTheHostIsRefused) {
  const auto nothing = [](NcclRank&) {};
  const auto meet = [](NcclRank& self) { self.meet(); };
  const auto find = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find("not permitted in the capture of a graph"), std::string::npos) << text;
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  find(error_in_capture(nothing, [](NcclRank& self) { self.all_reduce(self.fresh(4))->wait(); }),
       "rank 0, group test, communicator of ranks [0, 1]");
  find(error_in_capture(meet,
                        [](NcclRank& self) {
                          self.backend->startCoalescing();
                          self.send(self.fresh(4), 1);
                          self.backend->endCoalescing();
                        }),
       "rank 0, group test, first batch, 0 -> 1");
  find(error_in_capture(meet, [](NcclRank& self) { self.backend->barrier()->wait(); }),
       "query of a captured event");
}

TEST(NcclGraphs, ACollectiveThatNobodyWaitsForIsUnjoined) {
  const auto meet = [](NcclRank& self) { self.meet(); };
  const std::string error =
      error_in_capture(meet, [](NcclRank& self) { self.all_reduce(self.fresh(4)); });
  EXPECT_NE(error.find("unjoined work at the end of a capture: nccl allreduce"), std::string::npos)
      << error;
}

TEST(NcclGraphs, AWorkOfBeforeTheCaptureIsNotWaitedForInIt) {
  std::string error;
  run_job(2, [&](NcclRank& self) {
    const WorkPtr work = self.all_reduce(self.filled(4, 1));
    self.meet();
    if (self.rank != 0) return;
    try {
      captured(self.device.index(), [&] { work->wait(); });
    } catch (const c10::Error& refused) {
      error = refused.what_without_backtrace();
    }
  });
  EXPECT_NE(error.find("isolation"), std::string::npos) << error;
}

TEST(NcclGraphs, AShutdownWhileAGraphLivesIsAnError) {
  run_job(2, [](NcclRank& self) {
    self.meet();
    const at::Tensor x = self.filled(4, 1);
    Graph graph = captured(self.device.index(), [&] { self.all_reduce(x)->wait(); });
    EXPECT_TRUE(throws_with<c10::DistBackendError>([&] { self.backend->shutdown(); },
                                                   "graphs that replay its collectives live"));
    graph->replay();
    EXPECT_TRUE(at::equal(x.cpu(), constant(4, 2)));
    graph.reset();
  });
}

TEST(NcclGraphs, ARankThatDoesNotReplayLeavesTheOthersSpinning) {
  run_job(2, [](NcclRank& self) {
    self.meet();
    const at::Tensor x = self.filled(4, 1);
    Graph graph = captured(self.device.index(), [&] { self.all_reduce(x)->wait(); });
    if (self.rank == 0) {
      graph->replay();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      EXPECT_FALSE(is_idle(current_stream(self.device.index())));
    }
    self.rules.note(self.rank, [](NcclCounts& counts) { counts.host_blocks = -1; });
    const auto both = [&] {
      return self.rules.counts(0).host_blocks < 0 && self.rules.counts(1).host_blocks < 0;
    };
    EXPECT_TRUE(comes_true(both));
    if (self.rank == 1) graph->replay();
    EXPECT_TRUE(at::equal(x.cpu(), constant(4, 2)));
    graph.reset();
  });
}

}  // namespace
}  // namespace lockstep::testing
