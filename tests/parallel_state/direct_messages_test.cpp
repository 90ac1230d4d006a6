#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/offer_board.h"
#include "lockstep/parallel_state/process_group_state.h"
#include "lockstep/tests/parallel_state/forbidden_calls.h"
#include "lockstep/tests/parallel_state/impatient_group.h"
#include "lockstep/tests/support/rank_threads.h"

// Messages whose receivers read the senders' memory.

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using testing::errors_of_ranks;
using testing::run_ranks;

constexpr int64_t kMany = 50;  ///< messages, more than have memory on the board at first

bool reads(const ParallelState& state) {
  const auto& communicator = state.world().shared_state()->communicator;
  return communicator->transport(c10::kCPU).bytes_read().has_value();
}

at::Tensor numbered(int64_t number, int64_t numel = 5) {
  return at::arange(numel, at::kDouble).mul_(0.1).add_(static_cast<double>(number));
}

TEST(DirectMessages, ManyOfSeveralSizesArriveInTheirOrder) {
  run_ranks(2, [](const ParallelState& state) {
    ASSERT_TRUE(reads(state));
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
    for (int64_t i = 0; i < kMany; ++i) {
      const int64_t numel = i % 3 * 70'000 / 2;  // 0, 280 kB and 560 kB
      tensors.push_back(state.rank() == 0 ? numbered(i, numel) : at::empty({numel}, at::kDouble));
      works.push_back(state.rank() == 0 ? send(state.world(), tensors.back(), 1, "test")
                                        : receive(state.world(), tensors.back(), 0, "test"));
    }
    for (Work& work : works) work.wait();
    for (int64_t i = 0; i < kMany; ++i)
      EXPECT_TRUE(at::equal(tensors[i], numbered(i, tensors[i].numel()))) << i;
  });
}

TEST(DirectMessages, OtherCallsMayBeReceivedInAnotherOrder) {
  run_ranks(2, [](const ParallelState& state) {
    std::vector<Work> works;
    std::vector<at::Tensor> tensors;
    for (int64_t i = 0; i < kMany; ++i) {
      const int64_t number = state.rank() == 0 ? i : kMany - 1 - i;
      const std::string label = "message " + std::to_string(number);
      tensors.push_back(state.rank() == 0 ? numbered(number) : at::empty({5}, at::kDouble));
      works.push_back(state.rank() == 0 ? send(state.world(), tensors.back(), 1, label)
                                        : receive(state.world(), tensors.back(), 0, label));
    }
    for (Work& work : works) work.wait();
    if (state.rank() == 0) return;
    for (int64_t i = 0; i < kMany; ++i)
      EXPECT_TRUE(at::equal(tensors[i], numbered(kMany - 1 - i))) << i;
  });
}

TEST(DirectMessages, ABurstIsReceivedOneAfterTheOther) {
  const auto burst = [](const ParallelState& state, int64_t count) {
    if (state.rank() == 1) {
      const at::Tensor tensor = at::empty({1}, at::kLong);
      for (int64_t i = 0; i < count; ++i) {
        receive(state.world(), tensor, 0, "test").wait();
        ASSERT_EQ(tensor.item<int64_t>(), i);
      }
      return;
    }
    const at::Tensor numbers = at::arange(count, at::kLong);
    std::vector<Work> works;
    for (int64_t i = 0; i < count; ++i)
      works.push_back(send(state.world(), numbers.narrow(0, i, 1), 1, "test"));
    for (Work& work : works) work.wait();
  };
  run_ranks(2,
            [&](const ParallelState& state) {
              for (int round = 0; round < 50; ++round) burst(state, 400);
              burst(state, 2 * OfferBoard::kMostMessages);
            },
            {.timeout = std::chrono::seconds(5)});
}

TEST(DirectMessages, TheLastOfManyMayBeReceivedFirst) {
  run_ranks(2,
            [](const ParallelState& state) {
              std::vector<Work> works;
              const auto label = [](int64_t i) { return "message " + std::to_string(i); };
              for (int64_t i = 0; state.rank() == 0 && i < 20 * kMany; ++i)
                works.push_back(send(state.world(), numbered(i), 1, label(i)));
              for (Work& work : works) work.wait();
              const at::Tensor found = at::empty({5}, at::kDouble);
              for (int64_t i = 20 * kMany; state.rank() == 1 && i-- > 0;) {
                receive(state.world(), found, 0, label(i)).wait();
                EXPECT_TRUE(at::equal(found, numbered(i))) << i;
              }
            },
            {.timeout = std::chrono::seconds(5)});
}

TEST(DirectMessages, ArriveWhileTheReceiverWaitsForSomethingElse) {
  run_ranks(3, [](const ParallelState& state) {
    const at::Tensor tensor = state.rank() == 0 ? numbered(7) : at::empty({5}, at::kDouble);
    if (state.rank() == 0) {
      send(state.world(), tensor, 1, "test").wait();
      barrier(state.world(), "test");
      return;
    }
    Work work = state.rank() == 1 ? receive(state.world(), tensor, 0, "test") : Work();
    barrier(state.world(), "test");  // rank 0 joins after its message has been received
    work.wait();
    if (state.rank() == 1) EXPECT_TRUE(at::equal(tensor, numbered(7)));
  });
}

TEST(DirectMessages, GoRoundARingInBothDirectionsAtOnce) {
  for (const int64_t ranks : {2, 3, 5})
    run_ranks(ranks, [ranks](const ParallelState& state) {
      const int64_t next = (state.rank() + 1) % ranks, before = (state.rank() + ranks - 1) % ranks;
      for (int64_t round = 0; round < 20; ++round) {
        const at::Tensor mine = numbered(100 * round + state.rank(), 1000);
        const at::Tensor one = at::empty_like(mine), other = at::empty_like(mine);
        Work forth = exchange(state.world(), mine, next, one, before, "forth");
        exchange(state.world(), mine, before, other, next, "back").wait();
        forth.wait();
        EXPECT_TRUE(at::equal(one, numbered(100 * round + before, 1000))) << round;
        EXPECT_TRUE(at::equal(other, numbered(100 * round + next, 1000))) << round;
      }
    });
}

TEST(DirectMessages, AMessageOfAnotherSizeIsNotTaken) {
  const auto errors =
      errors_of_ranks(2,
                      [](const ParallelState& state) {
                        const at::Tensor tensor = at::ones({5 + state.rank()}, at::kDouble);
                        (state.rank() == 0 ? send(state.world(), tensor, 1, "test")
                                           : receive(state.world(), tensor, 0, "test"))
                            .wait();
                      },
                      {.timeout = milliseconds(1500)});
  for (const std::string& error : errors)
    EXPECT_NE(error.find("of test over group world [0, 1] failed"), std::string::npos) << error;
}

TEST(DirectMessages, ARankThatFailsEndsTheWaitsOfTheOthersAtOnce) {
  const auto start = std::chrono::steady_clock::now();
  const auto errors =
      errors_of_ranks(3,
                      [](const ParallelState& state) {
                        const at::Tensor tensor = at::ones({5}, at::kDouble);
                        if (state.rank() == 0) {
                          std::this_thread::sleep_for(milliseconds(100));
                          throw UsageError("rank 0 has had enough");
                        }
                        (state.rank() == 1 ? send(state.world(), tensor, 0, "test")
                                           : receive(state.world(), tensor, 0, "test"))
                            .wait();
                      },
                      {.timeout = std::chrono::seconds(60)});
  for (const std::string& error : errors)
    EXPECT_NE(error.find("rank 0 has had enough"), std::string::npos) << error;
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

TEST(DirectMessages, WhatASenderHasGivenUpIsNotTaken) {
  const auto errors = errors_of_ranks(
      2,
      [](const ParallelState& state) {
        const ProcessGroup group = testing::impatient_group(state);
        const at::Tensor tensor = at::ones({5}, at::kDouble);
        if (state.rank() == 0) {
          EXPECT_THROW(send(group, tensor, 1, "test").wait(), CommunicationError);
          tensor.fill_(255);
          return std::this_thread::sleep_for(std::chrono::seconds(4));
        }
        std::this_thread::sleep_for(std::chrono::seconds(3));
        receive(group, tensor, 0, "test").wait();
      },
      testing::with_impatient_group(std::chrono::seconds(1)));
  EXPECT_EQ(errors[0], "");
  EXPECT_NE(errors[1].find("receive"), std::string::npos) << errors[1];
}

TEST(DirectMessages, WhatAnExchangeHasGivenUpIsNotTaken) {
  const auto errors = errors_of_ranks(
      2,
      [](const ParallelState& state) {
        const ProcessGroup group = testing::impatient_group(state);
        const at::Tensor sent = at::ones({5}, at::kDouble), received = at::zeros({5}, at::kDouble);
        const int64_t other = 1 - state.rank();
        const auto swap = [&] { exchange(group, sent, other, received, other, "test").wait(); };
        if (state.rank() == 0) {
          EXPECT_THROW(swap(), CommunicationError);
          sent.fill_(255);
          return std::this_thread::sleep_for(std::chrono::seconds(5));
        }
        std::this_thread::sleep_for(std::chrono::seconds(3));
        EXPECT_THROW(swap(), CommunicationError);
        EXPECT_EQ(received.ne(255).sum().item<int64_t>(), 5);
      },
      testing::with_impatient_group(std::chrono::seconds(1)));
  for (const std::string& error : errors) EXPECT_EQ(error, "");
}

TEST(DirectMessages, WhatCannotBeStartedIsNotTaken) {
  const auto errors = errors_of_ranks(2, [](const ParallelState& state) {
    const at::Tensor tensor = at::ones({5}, at::kDouble);
    barrier(state.world(), "begin");
    if (state.rank() == 0) {
      testing::forbid_threads();
      EXPECT_THROW((void)send(state.world(), tensor, 1, "test"), CommunicationError);
      tensor.fill_(255);
      return std::this_thread::sleep_for(std::chrono::seconds(2));
    }
    std::this_thread::sleep_for(std::chrono::seconds(1));
    receive(state.world(), tensor, 0, "test").wait();
  });
  EXPECT_NE(errors[1].find("rank 0"), std::string::npos) << errors[1];
}

TEST(DirectMessages, WhatIsNotReceivedDoesNoHarmAtTheEnd) {
  run_ranks(2, [](const ParallelState& state) {
    const at::Tensor tensor = at::ones({5}, at::kDouble);
    std::vector<Work> works;
    if (state.rank() == 0) works.push_back(send(state.world(), tensor, 1, "test"));
    barrier(state.world(), "test");
  });
}

}  // namespace
}  // namespace lockstep
