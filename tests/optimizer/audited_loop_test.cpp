// Users' own loops under the audit: one with each front, one with collectives only, and mistakes.

#include "lockstep/optimizer/audited_loop.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/all_reduce_grads.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/distributed/reducer.h"
#include "lockstep/optimizer/clip_grad_norm.h"
#include "lockstep/optimizer/clip_grads.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::DescribedParams;
using testing::run_ranks;
using testing::throws_with;

constexpr int64_t kMicrobatches = 3;

std::string found_by(const AuditedLoop& loop) {
  return fmt::format("{}", fmt::join(audit_differences(expected_audit(loop), audit(loop)), "\n"));
}

/// A `cut` over tp, a norm with partial gradients unless `plain`, an expert if `experts`.
std::unique_ptr<DescribedParams> net_of(const ParallelState& state, bool plain, bool experts) {
  auto net = std::make_unique<DescribedParams>();
  const int64_t tensor = state.grids().size(GroupKind::tp);
  net->add("cut", {6 / tensor, 2}, {.placements = {{MeshAxis::tp, Shard{0}}}});
  if (!plain)
    net->add("norm", {3}, {.gradient_states = {{MeshAxis::tp, GradientState::partial_sum}}});
  net->add("whole", {5});
  if (experts)
    net->add("expert", {4, 3}, {.placements = {{MeshAxis::ep, Shard{0}}}, .is_expert = true});
  return net;
}

AuditedLoop loop_of(const ParallelState& state, const DescribedParams& net) {
  AuditedLoop loop;
  loop.parameters = collect_parameters(net);
  loop.state = &state;
  loop.num_microbatches = kMicrobatches;
  return loop;
}

void backward_of_means(const AuditedLoop::Loss& loss) {
  for (int64_t m = 0; m < kMicrobatches; ++m) (loss(m) / kMicrobatches).backward();
}

void zero(const DescribedParams& net) {
  for (const auto& [name, param] : net.params())
    if (param.grad().defined()) param.grad().zero_();
}

struct LoopWorld {
  int64_t ranks;
  ParallelSizes sizes;
  bool experts = false;
};

const std::vector<LoopWorld> kLoopWorlds = {{1, {}},
                                            {3, {}},
                                            {4, {.tensor = 2}},
                                            {4, {.context = 2}},
                                            {4, {.expert = 2}, true},
                                            {8, {.tensor = 2, .context = 2}}};

template <class Body>
void on_worlds(bool with_experts, Body body) {
  for (const LoopWorld& world : kLoopWorlds)
    if (with_experts || !world.experts)
      run_ranks(world.ranks, [&](const ParallelState& state) { body(state, world); },
                {.sizes = world.sizes});
}

TEST(AuditedLoop, OfGradientSynchronizer) {
  for (const GradientReduction reduction :
       {GradientReduction::mean, GradientReduction::sum, GradientReduction::per_token})
    on_worlds(/*with_experts=*/true, [&](const ParallelState& state, const LoopWorld& world) {
      const auto net = net_of(state, /*plain=*/false, world.experts);
      GradientSynchronizerOptions options = {.reduction = reduction};
      if (reduction == GradientReduction::per_token)
        options.token_group = state.group(GroupKind::dp_cp);
      GradientSynchronizer sync(*net, state, 1e-4, kMicrobatches, options);
      sync.bind();
      AuditedLoop loop = loop_of(state, *net);
      loop.reduction = reduction;
      loop.step = [&](const AuditedLoop::Loss& loss, const std::optional<at::Tensor>& tokens) {
        sync.zero_grad();
        const double batches = reduction == GradientReduction::mean ? kMicrobatches : 1;
        for (int64_t m = 0; m < kMicrobatches; ++m) (loss(m) / batches).backward();
        tokens ? sync.wait(*tokens) : sync.wait();
      };
      loop.norm = [&] { return clip_grad_norm_(*net, state, std::nullopt); };
      EXPECT_EQ(found_by(loop), "") << to_string(reduction);
      if (reduction != GradientReduction::mean) return;
      const AuditReport report = audit(loop);
      EXPECT_EQ(report.scaling, "mean");
      EXPECT_EQ(report.ranks[0].norm_elements, 12 + 3 + 5 + (world.experts ? 24 : 0));
      for (const AuditedParameter& param : report.ranks[0].parameters)
        EXPECT_EQ(param.effect, "every term x 1, averaged over the batch");
      for (const auto& [name, param] : net->params())
        EXPECT_EQ(param.grad().abs().sum().item<double>(), 0) << name;
    });
}

TEST(AuditedLoop, OfAllReduceGrads) {
  on_worlds(/*with_experts=*/true, [&](const ParallelState& state, const LoopWorld& world) {
    const auto net = net_of(state, /*plain=*/false, world.experts);
    AuditedLoop loop = loop_of(state, *net);
    loop.step = [&](const AuditedLoop::Loss& loss, const auto&) {
      zero(*net);
      backward_of_means(loss);
      all_reduce_grads(*net, state);
    };
    loop.norm = [&] { return clip_grad_norm_(*net, state, std::nullopt); };
    EXPECT_EQ(found_by(loop), "");
  });
}

TEST(AuditedLoop, OfReducer) {
  for (const bool finds_unused : {false, true})
    on_worlds(/*with_experts=*/false, [&](const ParallelState& state, const LoopWorld&) {
      const auto net = net_of(state, /*plain=*/true, false);
      Reducer reducer(*net, state, {.find_unused_parameters = finds_unused});
      AuditedLoop loop = loop_of(state, *net);
      loop.step = [&](const AuditedLoop::Loss& loss, const auto&) {
        reducer.zero_grad();
        for (int64_t m = 0; m < kMicrobatches; ++m) {
          Reducer::NoSyncGuard no_sync;
          if (m + 1 < kMicrobatches) no_sync = reducer.no_sync();
          reducer.prepare_for_forward();
          const at::Tensor mean = loss(m) / kMicrobatches;
          reducer.prepare_for_backward({mean});
          mean.backward();
        }
      };
      loop.norm = [&] { return clip_grad_norm_(*net, state, std::nullopt); };
      EXPECT_EQ(found_by(loop), "");
    });
}

TEST(AuditedLoop, OfDistributedDataParallel) {
  on_worlds(/*with_experts=*/true, [&](const ParallelState& state, const LoopWorld& world) {
    const auto net = net_of(state, /*plain=*/false, world.experts);
    DistributedDataParallel ddp(*net, state);
    ddp.set_num_microbatches(kMicrobatches);
    AuditedLoop loop = loop_of(state, *net);
    loop.reduction = GradientReduction::per_token;
    loop.step = [&](const AuditedLoop::Loss& loss, const std::optional<at::Tensor>& tokens) {
      ddp.zero_grad();
      for (int64_t m = 0; m < kMicrobatches; ++m) loss(m).backward();
      finalize_model_grads({&ddp}, tokens);
    };
    loop.norm = [&] { return grad_norm({&ddp}); };
    EXPECT_EQ(found_by(loop), "");
  });
}

/// A loop with collectives only.
AuditedLoop own_loop(const ParallelState& state, const DescribedParams& net, double factor,
                     GroupKind kind) {
  AuditedLoop loop = loop_of(state, net);
  loop.step = [&state, &net, factor, kind](const AuditedLoop::Loss& loss, const auto&) {
    zero(net);
    backward_of_means(loss);
    for (const auto& [name, param] : net.params()) {
      if (name == "left_out") continue;
      all_reduce(state.group(kind), param.grad(), ReduceOp::sum, "own").wait();
      param.grad().mul_(factor);
    }
  };
  return loop;
}

TEST(AuditedLoop, NamesMistakesOfAnOwnLoop) {
  run_ranks(4,
            [](const ParallelState& state) {
              DescribedParams net;
              net.add("p", {3});
              EXPECT_EQ(found_by(own_loop(state, net, 0.25, GroupKind::dp_cp)), "");
              const std::string all = "rank 1, `p`: terms: expected 1/4 x ranks [0, 1, 2, 3], ";
              const auto says = [](const std::string& found, const std::string& text) {
                EXPECT_NE(found.find(text), std::string::npos) << found;
              };
              says(found_by(own_loop(state, net, 0.5, GroupKind::dp_cp)),
                   all + "measured 1/2 x ranks [0, 1, 2, 3]");
              says(found_by(own_loop(state, net, 0.25, GroupKind::dp)),
                   all + "measured 1/4 x ranks [1, 3]");
              net.add("left_out", {2});
              says(found_by(own_loop(state, net, 0.25, GroupKind::dp_cp)),
                   "rank 2, `left_out`: terms: expected 1/4 x ranks [0, 1, 2, 3], measured 1 x "
                   "ranks [2]");
              AuditedLoop once = own_loop(state, net, 0.25, GroupKind::dp_cp);
              once.norm = [&] {
                return at::full({}, std::sqrt(3.0), at::kDouble);  // misses two elements
              };
              says(found_by(once), "rank 0: elements in the norm: expected 5, measured 3");
            },
            {.sizes = {.context = 2}});
}

TEST(AuditedLoop, RefusesWhatIsNoLoop) {
  const ParallelState state = ParallelState::single_process();
  DescribedParams net;
  net.add("p", {2});
  const auto refuses = [](const AuditedLoop& loop, const char* text) {
    EXPECT_TRUE(throws_with<UsageError>([&] { (void)audit(loop); }, text));
    EXPECT_TRUE(throws_with<UsageError>([&] { (void)expected_audit(loop); }, text));
  };
  AuditedLoop loop = own_loop(state, net, 1, GroupKind::dp);
  loop.num_microbatches = 0;
  refuses(loop, "num_microbatches: found 0, allowed: >= 1");
  loop = own_loop(state, net, 1, GroupKind::dp);
  loop.state = nullptr;
  refuses(loop, "state: missing");
  loop = own_loop(state, net, 1, GroupKind::dp);
  loop.step = {};
  refuses(loop, "step: missing");
  at::Tensor(net["p"]).set_requires_grad(false);
  refuses(own_loop(state, net, 1, GroupKind::dp), "found none that is trained");
}

// If the step leaves no gradient, the error says so with the name.
TEST(AuditedLoop, NamesAGradientThatIsNotThere) {
  const ParallelState state = ParallelState::single_process();
  DescribedParams net;
  net.add("p", {2});
  AuditedLoop loop = loop_of(state, net);
  loop.step = [](const AuditedLoop::Loss&, const auto&) {};
  EXPECT_NE(found_by(loop).find("rank 0, `p`: terms: expected 1 x ranks [0], measured no "
                                "gradient after the step"),
            std::string::npos)
      << found_by(loop);
}

}  // namespace
}  // namespace lockstep
