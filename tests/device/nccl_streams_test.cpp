#include "lockstep/tests/device/nccl_job.h"

// What is asynchronous under NCCL's rules, and what blocks the host.

namespace lockstep::testing {
namespace {

using Semaphore = std::counting_semaphore<64>;

TEST(NcclStreams, WaitReturnsBeforeThePeersCome) {
  Semaphore others{0};
  run_job(3, [&](NcclRank& self) {
    self.meet();
    if (self.rank != 0) others.acquire();
    const at::Tensor mine = self.filled(100, self.rank);
    const int64_t waits = device_counts(self.device.index()).waits;
    const WorkPtr work = self.all_reduce(mine);
    EXPECT_TRUE(work->wait());
    const at::Tensor twice = mine * 2;  // queued after the collective
    if (self.rank == 0) {
      EXPECT_FALSE(work->isCompleted());
      EXPECT_EQ(device_counts(self.device.index()).waits, waits);
      others.release(2);
    }
    EXPECT_TRUE(at::equal(twice.cpu(), constant(100, 6)));
    EXPECT_TRUE(work->isCompleted());
  });
}

TEST(NcclStreams, AMissingWaitShowsPoisonUnderTwentySeeds) {
  int poisoned = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Semaphore other{0};
    run_job(2,
            [&](NcclRank& self) {
              self.meet();
              const at::Tensor mine = self.filled(64, self.rank), all = self.fresh(128);
              if (self.rank == 1) other.acquire();
              const WorkPtr work = self.all_gather(all, mine);
              if (self.rank == 0) {
                poisoned += all.clone().cpu().isnan().all().item<bool>();  // the bug: no wait()
                other.release();
              }
              work->wait();
              EXPECT_TRUE(at::equal(all.cpu(), at::cat({constant(64, 0), constant(64, 1)})));
            },
            {.seed = seed});
  }
  EXPECT_EQ(poisoned, 20);
}

TEST(NcclStreams, AKernelWaitsForTheStreamOfItsCaller) {
  for (uint64_t seed = 1; seed <= 20; ++seed)
    run_job(2,
            [&](NcclRank& self) {
              at::Tensor x = self.filled(1000, 1);
              for (int i = 0; i < 10; ++i) x = x + 1;  // runs late
              self.all_reduce(x)->wait();
              EXPECT_TRUE(at::equal(x.cpu(), constant(1000, 22))) << "seed " << seed;
            },
            {.seed = seed});
}

TEST(NcclStreams, TensorsOfACollectiveAreKeptUntilWait) {
  Semaphore other{0};
  run_job(2, [&](NcclRank& self) {
    self.meet();
    at::Tensor input = self.filled(64, self.rank + 1), output = self.fresh(128);
    if (self.rank == 1) other.acquire();
    const auto memory = input.storage().getWeakStorageImpl();
    const WorkPtr work = self.all_gather(output, input);
    input.reset();
    EXPECT_FALSE(memory.expired());
    const at::Tensor other_values = self.filled(64, -5);  // would reuse the memory
    if (self.rank == 0) other.release();
    work->wait();
    EXPECT_TRUE(memory.expired());
    EXPECT_TRUE(at::equal(output.cpu(), at::cat({constant(64, 1), constant(64, 2)})));
  });
}

TEST(NcclStreams, TheMemoryOfAMessageIsNotUsedAgainBeforeItHasLeft) {
  Semaphore other{0};
  run_job(2, [&](NcclRank& self) {
    const at::Tensor got = self.fresh(64);
    if (self.rank == 0) {
      self.send(self.filled(1, 0), 1);  // creates the pair's communicator
      self.send(self.filled(64, 7), 1);
      for (int i = 0; i < 10; ++i) self.filled(64, -5);  // would reuse the memory
      self.synchronize();
      other.release();
    } else {
      self.receive(self.fresh(1), 0)->wait();
      other.acquire();
      self.receive(got, 0)->wait();
      EXPECT_TRUE(at::equal(got.cpu(), constant(64, 7)));
    }
  });
}

TEST(NcclStreams, OnlyTheFirstMessageOfADirectionBlocksTheHost) {
  Semaphore second{0};
  run_job(2, [&](NcclRank& self) {
    if (self.rank == 0) {
      self.send(self.filled(8, 1), 1);
      const WorkPtr work = self.send(self.filled(8, 2), 1);  // nobody has posted a receive
      EXPECT_FALSE(work->isCompleted());
      EXPECT_EQ(self.rules.counts(0).host_blocks, 2);
      second.release();
      self.receive(self.fresh(8), 1)->wait();
      EXPECT_EQ(self.rules.counts(0).host_blocks, 3);
    } else {
      const std::vector<std::string> blocked = {"rank 0, group test, communicator of ranks [0, 1]"};
      EXPECT_TRUE(comes_true([&] { return self.rules.blocked_hosts() == blocked; }));
      const at::Tensor got = self.fresh(8);
      self.receive(got, 0)->wait();
      second.acquire();
      self.receive(got, 0)->wait();
      EXPECT_TRUE(at::equal(got.cpu(), constant(8, 2)));
      self.send(got, 0);
    }
    EXPECT_EQ(self.rules.counts(self.rank).communicators, 1);
  });
}

TEST(NcclStreams, TheFirstUseOfTheOtherDirectionBlocksAgain) {
  Semaphore later{0};
  run_job(2, [&](NcclRank& self) {
    if (self.rank == 0) {
      self.send(self.filled(8, 1), 1)->wait();
      self.send(self.filled(8, 1), 1)->wait();
      self.receive(self.fresh(8), 1)->wait();
    } else {
      self.receive(self.fresh(8), 0)->wait();
      self.receive(self.fresh(8), 0)->wait();
      const std::vector<std::string> blocked = {"rank 0, group test, first recv, 1 -> 0"};
      EXPECT_TRUE(comes_true([&] { return self.rules.blocked_hosts() == blocked; }));
      self.send(self.filled(8, 1), 0)->wait();
    }
  });
}

TEST(NcclStreams, TheFirstCollectiveBlocksTheHostUntilAllHaveCome) {
  run_job(3, [&](NcclRank& self) {
    if (self.rank == 2) {
      EXPECT_TRUE(comes_true([&] { return self.rules.blocked_hosts().size() == 2; }));
    }
    const at::Tensor x = self.filled(4, 1);
    self.all_reduce(x)->wait();
    EXPECT_TRUE(at::equal(x.cpu(), constant(4, 3)));
  });
}

TEST(NcclStreams, MessagesComeInTheOrderInWhichTheyWereSentWhateverTheirTag) {
  run_job(2, [](NcclRank& self) {
    const int other = 1 - self.rank;
    if (self.rank == 0) {
      for (int i = 0; i < 5; ++i) self.send(self.filled(8, i), other, /*tag=*/10 - i);
    } else {
      for (int i = 0; i < 5; ++i) {
        const at::Tensor got = self.fresh(8);
        self.receive(got, other, /*tag=*/i)->wait();
        EXPECT_TRUE(at::equal(got.cpu(), constant(8, i)));
      }
    }
  });
}

TEST(NcclStreams, ACycleOfFirstReceivesLocksTheHostsUp) {
  const NcclJobOptions options;
  std::vector<std::string> blocked;
  std::thread observer([&] {
    EXPECT_TRUE(comes_true([&] { return options.rules->blocked_hosts().size() == 3; }));
    blocked = options.rules->blocked_hosts();
    options.rules->abort_all();
  });
  const auto errors = errors_of_job(
      3,
      [&](NcclRank& self) {
        self.receive(self.fresh(8), (self.rank + 2) % 3)->wait();
        self.send(self.filled(8, 1), (self.rank + 1) % 3)->wait();
      },
      options);
  observer.join();
  EXPECT_EQ(blocked,
            (std::vector<std::string>{"rank 0, group test, communicator of ranks [0, 2]",
                                      "rank 1, group test, communicator of ranks [0, 1]",
                                      "rank 2, group test, communicator of ranks [1, 2]"}));
  for (const std::string& error : errors)
    EXPECT_NE(error.find("have been aborted"), std::string::npos) << error;
}

TEST(NcclStreams, ACycleInABatchIsOneKernelOnTheGroupsCommunicator) {
  run_job(3, [](NcclRank& self) {
    const at::Tensor got = self.fresh(8), mine = self.filled(8, self.rank);
    self.backend->startCoalescing();
    const WorkPtr received = self.receive(got, (self.rank + 2) % 3);
    self.send(mine, (self.rank + 1) % 3);
    const WorkPtr work = self.backend->endCoalescing();
    EXPECT_EQ(received, nullptr);
    work->wait();
    EXPECT_TRUE(at::equal(got.cpu(), constant(8, (self.rank + 2) % 3)));
    const NcclCounts counts = self.rules.counts(self.rank);
    EXPECT_EQ(counts.communicators, 1);
    EXPECT_EQ(counts.kernels, 1);
  });
}

TEST(NcclStreams, MessagesOfABatchKeepTheirOrder) {
  run_job(2, [](NcclRank& self) {
    Tensors mine, got;
    self.backend->startCoalescing();
    for (int i = 0; i < 5; ++i) {
      mine.push_back(self.filled(8, 10 * self.rank + i));
      got.push_back(self.fresh(8));
      self.send(mine.back(), 1 - self.rank);
      self.receive(got.back(), 1 - self.rank);
    }
    self.backend->endCoalescing()->wait();
    for (int i = 0; i < 5; ++i)
      EXPECT_TRUE(
          at::equal(got[static_cast<size_t>(i)].cpu(), constant(8, 10 * (1 - self.rank) + i)));
  });
}

TEST(NcclStreams, TheWorkOfACallInABatchIsWorthless) {
  Semaphore other{0};
  run_job(2, [&](NcclRank& self) {
    self.meet();
    if (self.rank == 1) other.acquire();
    const at::Tensor all = self.fresh(8), mine = self.filled(4, self.rank);
    self.backend->startCoalescing();
    const WorkPtr of_call = self.all_gather(all, mine);
    const WorkPtr of_batch = self.backend->endCoalescing();
    EXPECT_TRUE(of_call->isCompleted());
    of_call->wait();
    if (self.rank == 0) {
      EXPECT_TRUE(all.clone().cpu().isnan().all().item<bool>());
      other.release();
    }
    of_batch->wait();
    EXPECT_TRUE(at::equal(all.cpu(), at::cat({constant(4, 0), constant(4, 1)})));
  });
}

/// Rank 0 sends and then joins a sum of all; rank 1 joins the sum and then receives.
void send_beside_a_sum(NcclRank& self) {
  const at::Tensor x = self.filled(8, 1), got = self.fresh(8);
  if (self.rank == 0) self.send(self.filled(8, 7), 1);
  const WorkPtr sum = self.all_reduce(x);
  if (self.rank == 1) self.receive(got, 0)->wait();
  sum->wait();
  EXPECT_TRUE(at::equal(x.cpu(), constant(8, 3)));
  if (self.rank == 1) {
    EXPECT_TRUE(at::equal(got.cpu(), constant(8, 7)));
  }
}

/// Connects the group and the pair before the test.
void use_all_once(NcclRank& self) {
  self.meet();
  const at::Tensor x = self.filled(8, 1);
  if (self.rank == 0) self.send(x, 1);
  if (self.rank == 1) self.receive(x, 0)->wait();
  self.synchronize();
}

TEST(NcclStreams, MessagesRunBesideCollectivesUnlessTheGroupIsConnectedEagerly) {
  run_job(3, [](NcclRank& self) {
    use_all_once(self);
    send_beside_a_sum(self);
  });
  OverdueWorks overdue;
  errors_of_job(
      3,
      [](NcclRank& self) {
        self.backend->eagerConnectSingleDevice(self.device);
        use_all_once(self);
        EXPECT_EQ(self.rules.counts(self.rank).communicators, 1);
        self.give_up_soon();
        const at::Tensor x = self.filled(8, 1), got = self.fresh(8);
        if (self.rank == 0) self.send(self.filled(8, 7), 1);
        const WorkPtr sum = self.all_reduce(x);
        if (self.rank == 1) self.receive(got, 0)->wait();
        sum->wait();
        self.synchronize();  // ends when the watchdogs have aborted all
      },
      overdue.options(/*abort_after=*/5));
  EXPECT_EQ(overdue.messages.size(), 5U);  // three sums, a send and a receive
}

TEST(NcclStreams, ACallThatIsNotAsynchronousRunsOnTheCurrentStream) {
  Semaphore other{0};
  run_job(2, [&](NcclRank& self) {
    self.meet();
    if (self.rank == 1) other.acquire();
    at::Tensor all = self.fresh(8), mine = self.filled(4, self.rank);
    c10d::AllgatherOptions options;
    options.asyncOp = false;
    EXPECT_EQ(self.backend->_allgather_base(all, mine, options), nullptr);
    const at::Tensor copy = all.clone();  // ordered by the stream, without a wait
    if (self.rank == 0) other.release();
    EXPECT_TRUE(at::equal(copy.cpu(), at::cat({constant(4, 0), constant(4, 1)})));
  });
}

TEST(NcclStreams, WaitingForABarrierBlocksTheHost) {
  std::atomic<bool> came{false};
  run_job(2, [&](NcclRank& self) {
    self.meet();
    if (self.rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      came = true;
    }
    self.meet();
    EXPECT_TRUE(came);
  });
}

TEST(NcclStreams, TheFutureOfAWorkIsOfItsStream) {
  Semaphore other{0};
  run_job(2, [&](NcclRank& self) {
    self.meet();
    if (self.rank == 1) other.acquire();
    const WorkPtr work = self.all_reduce(self.filled(8, 1));
    const auto future = work->getFuture();
    EXPECT_TRUE(future->completed());  // as in c10d: it has been launched
    if (self.rank == 0) other.release();
    future->wait();  // the current stream then waits for the kernel
    EXPECT_TRUE(at::equal(future->value().toTensorVector().at(0).cpu(), constant(8, 2)));
  });
}

TEST(NcclStreams, WorksThroughTheProcessGroupOfC10d) {
  run_job(2, [](NcclRank& self) {
    using Type = c10d::ProcessGroup::BackendType;
    const auto group = c10::make_intrusive<c10d::ProcessGroup>(self.rank, self.size);
    group->setBackend(self.device.type(), Type::CUSTOM, self.backend);
    group->setDefaultBackend(Type::CUSTOM);
    Tensors one = {self.filled(8, self.rank + 1)};
    group->allreduce(one)->wait();
    EXPECT_TRUE(at::equal(one[0].cpu(), constant(8, 3)));
    at::Tensor all = self.fresh(16);
    group->startCoalescing(self.device.type());
    group->_allgather_base(all, one[0]);
    group->endCoalescing(self.device.type())->wait();
    EXPECT_TRUE(at::equal(all.cpu(), constant(16, 3)));
    if (self.rank == 0)
      group->send(one, 1, 0)->wait();
    else
      group->recv(one, 0, 0)->wait();
    self.synchronize();
  });
}

}  // namespace
}  // namespace lockstep::testing
