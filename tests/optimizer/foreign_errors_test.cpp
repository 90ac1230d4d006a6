// A user's own function throws on one rank only: an error of libtorch or of the standard library, a
// text or a number. The other ranks get an error with the rank and the text, and none waits for the
// timeout.

#include <gtest/gtest.h>

#include <chrono>

#include <ATen/ATen.h>

#include "lockstep/distributed/comm_hooks.h"
#include "lockstep/distributed/reducer.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/distributed_training.h"
#include "lockstep/tests/support/open_ranks.h"

namespace lockstep {
namespace {

using testing::adamw_config;
using testing::errors_of_open_ranks;
using testing::RankBody;
using testing::RankThreadOptions;
using testing::reduce_gradients;
using testing::run_backwards;
using testing::Setting;
using testing::SmallNet;

constexpr auto kTimeout = std::chrono::seconds(30), kPromptly = std::chrono::seconds(15);

enum class Thrown { standard, libtorch, characters, string, number };

void throw_on(bool guilty, Thrown kind) {
  if (!guilty) return;
  if (kind == Thrown::standard) throw std::runtime_error("out of luck");
  if (kind == Thrown::libtorch) TORCH_CHECK(false, "out of luck");
  if (kind == Thrown::characters) throw "out of luck";
  if (kind == Thrown::string) throw std::string("out of luck");
  throw 7;
}

/// Every rank learns of rank 1's error, with its text if it has one.
void expect_all_told(const RankBody& body, Thrown kind, RankThreadOptions options = {}) {
  options.timeout = kTimeout;
  const auto start = std::chrono::steady_clock::now();
  const auto errors = errors_of_open_ranks(
      2,
      [&](const ParallelState& state) {
        try {
          body(state);
        } catch (const std::exception&) {
          throw;
        } catch (...) {
          throw std::runtime_error("no std::exception");
        }
      },
      options);
  EXPECT_LT(std::chrono::steady_clock::now() - start, kPromptly);
  const std::string text = kind == Thrown::number ? "unknown type" : "out of luck";
  EXPECT_NE(errors[0].find(text), std::string::npos) << errors[0];
  EXPECT_NE(errors[0].find("rank 1"), std::string::npos) << errors[0];
  EXPECT_EQ(errors[0].find("Exception raised from"), std::string::npos) << errors[0];
  EXPECT_FALSE(errors[1].empty());
}

constexpr Thrown kKinds[] = {Thrown::standard, Thrown::libtorch, Thrown::characters, Thrown::string,
                             Thrown::number};

struct Failing final : UpdateRule {
  Failing(bool guilty, Thrown kind)
      : UpdateRule({.name = "failing"}), guilty_(guilty), kind_(kind) {}
  void update(const UpdateRange&) const override { throw_on(guilty_, kind_); }

 private:
  bool guilty_;
  Thrown kind_;
};

TEST(ForeignErrors, OfAnUpdateRuleReachEveryRank) {
  for (const bool distributed : {true, false})
    for (const Thrown kind : kKinds)
      expect_all_told(
          [&](const ParallelState& state) {
            SmallNet net;
            DistributedDataParallel ddp(net, state, Setting{.distributed = distributed}.ddp());
            Optimizer optimizer({&ddp}, adamw_config(), {},
                                std::make_shared<Failing>(state.rank() == 1, kind));
            for (int step = 0; step < 2; ++step) {
              ddp.zero_grad_buffer();
              run_backwards(net, ddp, step, 1, at::kDouble);
              reduce_gradients(ddp);
              optimizer.step();
            }
          },
          kind);
}

TEST(ForeignErrors, OfAPredicateOfAnOverrideReachEveryRank) {
  for (const Thrown kind : kKinds)
    expect_all_told(
        [&](const ParallelState& state) {
          SmallNet net;
          DistributedDataParallel ddp(net, state);
          const ParamOverride own = {.applies_to =
                                         [&](const NamedParameter&) {
                                           throw_on(state.rank() == 1, kind);
                                           return true;
                                         },
                                     .wd_mult = 2};
          Optimizer(std::vector<DistributedDataParallel*>{&ddp}, adamw_config(), {own});
        },
        kind);
}

TEST(ForeignErrors, OfACommunicationHookReachEveryRank) {
  for (const bool at_start : {true, false})
    for (const Thrown kind : {Thrown::standard, Thrown::libtorch})
      expect_all_told(
          [&](const ParallelState& state) {
            SmallNet net;
            Reducer reducer(net, state.group(GroupKind::dp_cp));
            reducer.register_comm_hook(std::make_shared<FunctionHook>(
                "failing", [&](const GradBucket& bucket) -> CommHook::Finish {
                  throw_on(at_start && state.rank() == 1, kind);
                  const ProcessGroup group = state.group(GroupKind::dp_cp);
                  auto work = std::make_shared<Work>(
                      all_reduce(group, bucket.buffer, ReduceOp::sum, "hook"));
                  return [&state, work, kind, at_start, sum = bucket.buffer] {
                    throw_on(!at_start && state.rank() == 1, kind);
                    work->wait();
                    return sum;
                  };
                }));
            for (int step = 0; step < 2; ++step) {
              reducer.zero_grad_buffer();
              reducer.prepare_for_forward();
              reducer.prepare_for_backward();
              net.loss(SmallNet::samples(step, 4)).backward();
            }
          },
          kind);
}

TEST(ForeignErrors, OfTheIterationsOfAJoinReachEveryRank) {
  for (const Thrown kind : kKinds)
    expect_all_told(
        [&](const ParallelState& state) {
          SmallNet net;
          Reducer reducer(net, state.group(GroupKind::dp_cp));
          reducer.join([&] { throw_on(state.rank() == 1, kind); });
        },
        kind);
}

}  // namespace
}  // namespace lockstep
