#include "lockstep/tests/device/nccl_job.h"
#include "lockstep/tests/support/throws_with.h"

// What never ends under NCCL's rules, and how it is ended.

namespace lockstep::testing {
namespace {

using std::chrono::milliseconds;

/// Runs a program that hangs on both ranks. Returns what the watchdogs report.
std::vector<std::string> overdue_on_two_ranks(const std::function<void(NcclRank&)>& program) {
  OverdueWorks overdue;
  errors_of_job(
      2,
      [&](NcclRank& self) {
        self.meet();
        self.give_up_soon();
        program(self);
        self.synchronize();
      },
      overdue.options(/*abort_after=*/2));
  std::sort(overdue.messages.begin(), overdue.messages.end());
  return overdue.messages;
}

void expect_names(const std::vector<std::string>& messages, const std::vector<std::string>& parts) {
  ASSERT_EQ(messages.size(), parts.size());
  for (size_t i = 0; i < parts.size(); ++i)
    EXPECT_NE(messages[i].find(parts[i]), std::string::npos)
        << messages[i] << ", expected " << parts[i];
}

TEST(NcclFailures, TheWatchdogNamesACollectiveThatAMemberLeavesOut) {
  OverdueWorks overdue;
  errors_of_job(
      2,
      [](NcclRank& self) {
        self.meet();
        self.give_up_soon();
        if (self.rank == 1) self.all_reduce(self.filled(12, 1))->wait();
        self.synchronize();
      },
      overdue.options(/*abort_after=*/1));
  expect_names(
      overdue.messages,
      {"NCCL's watchdog: rank 1, group test, allreduce, sequence 2, 12 elements, has run"});
  EXPECT_NE(overdue.messages.at(0).find("timeout 300 ms"), std::string::npos);
}

TEST(NcclFailures, DifferentCollectivesNeverEnd) {
  expect_names(overdue_on_two_ranks([](NcclRank& self) {
                 const at::Tensor x = self.filled(4, 1);
                 (self.rank == 0 ? self.all_reduce(x) : self.broadcast(x, 0))->wait();
               }),
               {"rank 0, group test, allreduce", "rank 1, group test, broadcast"});
}

TEST(NcclFailures, DifferentSizesNeverEnd) {
  expect_names(overdue_on_two_ranks(
                   [](NcclRank& self) { self.all_reduce(self.filled(4 + self.rank, 1))->wait(); }),
               {"rank 0, group test, allreduce, sequence 2, 4 elements",
                "rank 1, group test, allreduce, sequence 2, 5 elements"});
}

TEST(NcclFailures, DifferentRootsNeverEnd) {
  expect_names(overdue_on_two_ranks(
                   [](NcclRank& self) { self.broadcast(self.filled(4, 1), self.rank)->wait(); }),
               {"rank 0, group test, broadcast", "rank 1, group test, broadcast"});
}

TEST(NcclFailures, AMessageOfAnotherSizeNeverEnds) {
  expect_names(overdue_on_two_ranks([](NcclRank& self) {
                 if (self.rank == 0)
                   self.send(self.filled(4, 1), 1)->wait();
                 else
                   self.receive(self.fresh(5), 0)->wait();
               }),
               {"rank 0, group test, send, sequence 1, 4 elements",
                "rank 1, group test, recv, sequence 1, 5 elements"});
}

TEST(NcclFailures, TwoThatBothSendFirstNeverReceive) {
  OverdueWorks overdue;
  errors_of_job(
      2,
      [](NcclRank& self) {
        const int other = 1 - self.rank;
        const at::Tensor x = self.filled(4, 1);
        for (const int sender : {0, 1})  // connects both directions
          (self.rank == sender ? self.send(x, other) : self.receive(x, other))->wait();
        self.synchronize();
        self.give_up_soon();
        self.send(self.filled(4, 1), other)->wait();
        self.receive(self.fresh(4), other)->wait();
        self.synchronize();
      },
      overdue.options(/*abort_after=*/4));
  EXPECT_EQ(overdue.messages.size(), 4U);
}

TEST(NcclFailures, CallsOfOneSizeAreCombinedWhateverElseDiffers) {
  run_job(2, [](NcclRank& self) {
    const at::Tensor x = self.rank == 0 ? self.filled(4, 1) : self.filled(4, 1, at::kInt);
    self.all_reduce(x)->wait();  // the bits of 1.0F and those of 1
    EXPECT_FALSE(at::equal(x.cpu().to(at::kFloat), constant(4, 2)));
    Tensors one = {self.filled(4, self.rank + 1)};
    c10d::AllreduceOptions options;
    options.reduceOp = self.rank == 0 ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
    self.backend->allreduce(one, options)->wait();
    EXPECT_TRUE(at::equal(one[0].cpu(), constant(4, 2)));
  });
}

TEST(NcclFailures, DestructionAbortsWorkInFlightAndLeavesThePeersHanging) {
  OverdueWorks overdue;
  errors_of_job(
      2,
      [](NcclRank& self) {
        self.meet();
        const at::Tensor all = self.fresh(8), mine = self.filled(4, self.rank);
        if (self.rank == 0) {
          self.all_gather(all, mine)->wait();
          self.backend.reset();
          EXPECT_TRUE(all.cpu().isnan().all().item<bool>());
        } else {
          self.give_up_soon();
          self.all_gather(all, mine)->wait();
          self.synchronize();
        }
      },
      overdue.options(/*abort_after=*/1));
  expect_names(overdue.messages, {"rank 1, group test, allgather"});
}

TEST(NcclFailures, ShutdownWaitsForWorkInFlight) {
  for (uint64_t seed = 1; seed <= 20; ++seed)
    run_job(2,
            [&](NcclRank& self) {
              self.meet();
              const at::Tensor all = self.fresh(8), mine = self.filled(4, self.rank);
              if (self.rank == 1) std::this_thread::sleep_for(milliseconds(5));
              const WorkPtr work = self.all_gather(all, mine);
              self.backend->shutdown();
              self.backend.reset();
              EXPECT_TRUE(work->isCompleted());
              work->wait();
              EXPECT_TRUE(at::equal(all.cpu(), at::cat({constant(4, 0), constant(4, 1)})));
            },
            {.seed = seed});
}

TEST(NcclFailures, CallsAfterTheEndThrow) {
  run_job(2, [](NcclRank& self) {
    self.meet();
    if (self.rank == 0)
      self.backend->abort();
    else
      self.backend->shutdown();
    EXPECT_TRUE(throws_with<c10::DistBackendError>(
        [&] { self.all_reduce(self.filled(4, 1)); },
        self.rank == 0 ? "rank 0, group test, communicators have been aborted"
                       : "rank 1, group test, communicators have been shut down"));
  });
}

TEST(NcclFailures, AbortReleasesTheOwnKernelsAlone) {
  std::binary_semaphore aborted{0};
  OverdueWorks overdue;
  errors_of_job(
      3,
      [&](NcclRank& self) {
        self.meet();
        if (self.rank == 2) return aborted.acquire();  // makes no call
        if (self.rank == 1) self.give_up_soon();
        const WorkPtr work = self.all_reduce(self.filled(4, 1));
        work->wait();
        if (self.rank == 0) {
          self.backend->abort();
          self.synchronize();
          EXPECT_TRUE(work->isCompleted());
          aborted.release();
        } else {
          self.synchronize();
          EXPECT_EQ(overdue.messages.size(), 1U);  // nothing else released it
        }
      },
      overdue.options(/*abort_after=*/1));
  expect_names(overdue.messages, {"rank 1, group test, allreduce"});
}

TEST(NcclFailures, AWaitWithATimeoutThrowsAndAborts) {
  const auto errors = errors_of_job(2, [](NcclRank& self) {
    self.meet();
    if (self.rank == 0) self.all_reduce(self.filled(4, 1))->wait(milliseconds(100));
  });
  EXPECT_NE(errors[0].find("rank 0, group test, allreduce, sequence 2, 4 elements did not end "
                           "within 100 ms"),
            std::string::npos)
      << errors[0];
}

TEST(NcclFailures, AMemberThatNeverComesIsAStoreTimeoutOfThoseThatNeedItsId) {
  std::binary_semaphore failed{0};
  NcclJobOptions options;
  options.timeout = milliseconds(200);
  const auto errors = errors_of_job(
      2,
      [&](NcclRank& self) {
        if (self.rank == 0) return failed.acquire();
        try {
          self.all_reduce(self.filled(4, 1));
        } catch (...) {
          failed.release();
          throw;
        }
      },
      options);
  EXPECT_NE(errors[1].find("rank 1, group test, communicator group: no unique id in the store "
                           "within 200 ms"),
            std::string::npos)
      << errors[1];
}

TEST(NcclFailures, JobsOfOneProcessDoNotMeet) {
  const auto sum_of = [](double value, NcclJobOptions options) {
    run_job(
        4,
        [value](NcclRank& self) {
          for (int i = 0; i < 20; ++i) {
            const at::Tensor x = self.filled(8, value);
            self.all_reduce(x)->wait();
            EXPECT_TRUE(at::equal(x.cpu(), constant(8, 4 * value)));
          }
        },
        std::move(options));
  };
  std::thread beside([&] { sum_of(2, {.first_device = 4}); });
  sum_of(1, {});
  beside.join();
  sum_of(3, {});
}

TEST(NcclFailures, RefusesWhatNcclRefuses) {
  run_job(2, [](NcclRank& self) {
    const auto refuses = [&](const at::Tensor& tensor, const c10d::ReduceOp& op,
                             const std::string& part) {
      return throws_with<c10::Error>(
          [&] {
            Tensors one = {tensor};
            c10d::AllreduceOptions options;
            options.reduceOp = op;
            self.backend->allreduce(one, options);
          },
          part);
    };
    const at::Tensor x = self.filled(4, 1);
    EXPECT_TRUE(refuses(at::ones({4}), c10d::ReduceOp::SUM, "allreduce: found a tensor on cpu"));
    EXPECT_TRUE(refuses(at::ones({4}).to(lagging_device(7)), c10d::ReduceOp::SUM,
                        "allreduce: found a tensor on lagging:7, allowed: lagging:"));
    EXPECT_TRUE(
        refuses(x.view({2, 2}).t(), c10d::ReduceOp::SUM, "allreduce: found strides [1, 2]"));
    EXPECT_TRUE(refuses(self.filled(4, 1, at::kShort), c10d::ReduceOp::SUM,
                        "NCCL has no type for tensors of Short"));
    EXPECT_TRUE(
        refuses(self.filled(4, 1, at::kBool), c10d::ReduceOp::AVG, "does not average Bool"));
    EXPECT_TRUE(refuses(x, c10d::ReduceOp::BXOR, "no bitwise reductions"));
    EXPECT_TRUE(refuses(self.filled(4, 1, at::kBFloat16), c10d::makeNCCLPreMulSum(0.5), "#190745"));
    EXPECT_TRUE(refuses(self.filled(4, 1, at::kInt), c10d::makeNCCLPreMulSum(0.5),
                        "PREMUL_SUM of Int, allowed: Half, Float, Double"));
    EXPECT_TRUE(throws_with<c10::Error>(
        [&] {
          self.send(x.view({2, 2}).t(), 1 - self.rank);
        },
        "send: found strides"));
    EXPECT_TRUE(throws_with<c10::Error>([&] { self.send(x, 2); }, "send: found rank 2"));
    EXPECT_TRUE(throws_with<c10::Error>([&] { self.send(x, self.rank); },
                                        "nothing to the same rank outside of a batch"));
    EXPECT_TRUE(throws_with<c10::Error>([&] { self.all_gather(self.fresh(7), x); },
                                        "allgather: found 7 elements for 2 ranks and 4 for one"));
    EXPECT_TRUE(self.rules.counts(self.rank).calls.empty());
    EXPECT_EQ(self.rules.counts(self.rank).communicators, 0);
  });
}

/// Runs in its own process, which the watchdog ends.
void leave_a_collective_out() {
  errors_of_job(2, [](NcclRank& self) {
    self.meet();
    self.give_up_soon();
    if (self.rank == 0) self.all_reduce(self.filled(4, 1))->wait();
    self.synchronize();
  });
}

TEST(NcclFailuresDeathTest, TheWatchdogEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(leave_a_collective_out(),
               "NCCL's watchdog: rank 0, group test, allreduce, sequence 2, 4 elements, has run");
}

}  // namespace
}  // namespace lockstep::testing
