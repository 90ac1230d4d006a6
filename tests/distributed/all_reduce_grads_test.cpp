#include "lockstep/distributed/all_reduce_grads.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/mesh_params.h"
#include "lockstep/tests/support/open_ranks.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/small_net.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::backward_of;
using testing::CollectiveLog;
using testing::grad_is;
using testing::ones_on;
using testing::run_ranks;
using testing::sent_by;
using testing::SmallNet;
using testing::throws_with;
using Sent = std::vector<std::string>;

/// The reference for all_reduce_grads(): the mean over the group's ranks, parameter by parameter.
void plain_loop(const torch::nn::Module& model, const ProcessGroup& group) {
  for (const at::Tensor& param : model.parameters()) {
    if (!param.grad().defined()) continue;
    at::Tensor sum = param.grad().clone();
    all_reduce(group, sum, ReduceOp::sum, "gradient").wait();
    param.mutable_grad().copy_(sum / group.size());
  }
}

/// The order of the axes in the example: cp is the innermost.
DeviceMesh world_mesh(const ParallelState& state, int64_t dp, int64_t tp, int64_t cp) {
  return {state, {dp, tp, cp}, {"dp", "tp", "cp"}};
}

TEST(AllReduceGrads, EqualsThePlainLoopOverDpAndCpOrCpAlone) {
  struct Case {
    int64_t dp, tp, cp;
  };
  for (const Case& sizes :
       {Case{2, 1, 1}, Case{3, 1, 1}, Case{2, 1, 2}, Case{2, 2, 2}, Case{1, 2, 2}})
    for (const bool use_ddp : {false, true})
      run_ranks(sizes.dp * sizes.tp * sizes.cp, [&](const ParallelState& state) {
        const DeviceMesh mesh = world_mesh(state, sizes.dp, sizes.tp, sizes.cp);
        SmallNet ours(4), theirs(4);
        for (const SmallNet* net : {&ours, &theirs})
          net->loss(SmallNet::samples(10 * state.rank(), 5)).backward();
        std::vector<const void*> places;
        for (const at::Tensor& param : ours.parameters()) places.push_back(param.grad().data_ptr());
        all_reduce_grads(ours, mesh, use_ddp);
        plain_loop(theirs, mesh.get_group(use_ddp ? std::vector<std::string>{"cp"}
                                                  : std::vector<std::string>{"dp", "cp"}));
        for (size_t i = 0; i < ours.parameters().size(); ++i) {
          EXPECT_EQ(ours.parameters()[i].grad().data_ptr(), places[i]);  // never rebound
          EXPECT_TRUE(at::allclose(ours.parameters()[i].grad(), theirs.parameters()[i].grad(),
                                   1e-14, 1e-15));
        }
      });
}

TEST(AllReduceGrads, SendsOneAgreementAndOneBucketForEachDtype) {
  CollectiveLog log;
  run_ranks(8,
            [](const ParallelState& state) {
              const DeviceMesh mesh = world_mesh(state, 2, 2, 2);
              const MeshParameters params = {ones_on(mesh["tp"], {6}, {Shard{0}}, "a DTensor"),
                                             at::ones({5}).requires_grad_(true),
                                             at::ones({2}, at::kDouble).requires_grad_(true),
                                             at::ones({7}),  // not trained
                                             at::ones({4}, at::kBFloat16).requires_grad_(true)};
              backward_of({params[0], params[1], params[2], params[4]},
                          static_cast<double>(state.rank()));
              all_reduce_grads(params, mesh, /*use_ddp=*/false);
              // The ranks of tp = 0 are 0 1 4 5, those of tp = 1 are 2 3 6 7.
              for (const size_t i : {0, 1, 2, 4})
                EXPECT_TRUE(grad_is(params[i], state.rank() % 4 < 2 ? 2.5 : 4.5)) << i;
              EXPECT_FALSE(params[3].tensor.grad().defined());
            },
            {.log = &log});
  EXPECT_EQ(sent_by(log, 5), (Sent{"all_gather [0 1 4 5] 8", "all_reduce (max) [0 1 4 5] 16",
                                   "all_reduce (sum) [0 1 4 5] 32", "all_reduce (sum) [0 1 4 5] 16",
                                   "all_reduce (sum) [0 1 4 5] 8"}));
}

TEST(AllReduceGrads, CutsBucketsOf25MebibytesTheLastParametersFirst) {
  CollectiveLog log;
  run_ranks(2,
            [](const ParallelState& state) {
              std::vector<at::Tensor> tensors;
              for (const int64_t mebi : {10, 20, 5}) {
                tensors.push_back(at::ones({mebi << 18}).requires_grad_(true));
                tensors.back().mutable_grad() = at::ones({mebi << 18});
              }
              all_reduce_grads(tensors, DeviceMesh(state, {2, 1}, {"dp", "cp"}), false);
              EXPECT_TRUE(grad_is(tensors[1], 1));
            },
            {.log = &log});
  EXPECT_EQ(sent_by(log, 0), (Sent{"all_gather [0 1] 8", "all_reduce (max) [0 1] 12",
                                   "all_reduce (sum) [0 1] " + std::to_string(25 << 20),
                                   "all_reduce (sum) [0 1] " + std::to_string(10 << 20)}));
}

TEST(AllReduceGrads, RanksWithoutAGradientCountAsZeros) {
  run_ranks(4, [](const ParallelState& state) {
    const auto leaf = [](at::ScalarType dtype) {
      return at::ones({3}, dtype).requires_grad_(true);
    };
    const MeshParameters params = {leaf(at::kFloat), leaf(at::kFloat), leaf(at::kDouble)};
    if (state.rank() == 2) backward_of({params[1]}, 8);
    backward_of({params[2]}, 4);
    all_reduce_grads(params, DeviceMesh(state, {2, 2}, {"dp", "cp"}), false);
    EXPECT_FALSE(params[0].tensor.grad().defined());  // no rank has one
    EXPECT_TRUE(grad_is(params[1], 2));               // one has
    EXPECT_TRUE(grad_is(params[2], 4));
  });
}

TEST(AllReduceGrads, StridedGradientsAndViewsOfABufferStayWhatTheyAre) {
  run_ranks(2, [](const ParallelState& state) {
    const double rank = static_cast<double>(state.rank());
    const at::Tensor turned = at::ones({2, 3}).requires_grad_(true);
    const at::Tensor viewed = at::ones({2}).requires_grad_(true);
    const at::Tensor buffer = at::full({4}, rank);
    turned.mutable_grad() = at::full({3, 2}, rank).t();
    viewed.mutable_grad() = buffer.narrow(0, 1, 2);
    all_reduce_grads({turned, viewed}, DeviceMesh(state, {2, 1}, {"dp", "cp"}), false);
    EXPECT_TRUE(grad_is(turned, 0.5));
    EXPECT_EQ(turned.grad().strides(), (std::vector<int64_t>{1, 2}));
    EXPECT_TRUE(at::equal(buffer, at::tensor({rank, 0.5, 0.5, rank}, at::kFloat)));
  });
}

TEST(AllReduceGrads, NothingIsSentByOneRankAndWrongOnesAreNamed) {
  const ParallelState state = ParallelState::single_process();
  const at::Tensor weight = at::ones({2}).requires_grad_(true);
  backward_of({weight}, 3);
  all_reduce_grads({weight}, DeviceMesh(state, {1, 1}, {"dp", "cp"}), false);
  EXPECT_TRUE(grad_is(weight, 3));
  EXPECT_TRUE(throws_with<UsageError>(
      [&] { all_reduce_grads({weight}, DeviceMesh(state, {1}, {"dp"}), true); }, "cp"));
  const auto errors = testing::errors_of_ranks(2, [](const ParallelState& ranks) {
    const at::Tensor table = at::ones({4, 2}).requires_grad_(true);
    const bool sparse = ranks.rank() == 1;
    at::embedding(table, at::arange(2), -1, false, sparse).sum().backward();
    all_reduce_grads({MeshParameter(table, "table")}, DeviceMesh(ranks, {2, 1}, {"dp", "cp"}),
                     false);
  });
  for (const std::string& error : errors)
    EXPECT_EQ(error,
              "all_reduce_grads: the gradient of 'table' is sparse, allowed: dense gradients");
}

/// Expects an error with `part` on all of four ranks: those on which `reduce` throws, and the
/// others, which wait for them after it.
void expect_all_ended(const ParallelSizes& sizes, const testing::RankBody& reduce,
                      const std::string& part) {
  const auto errors = testing::errors_of_open_ranks(
      4,
      [&](const ParallelState& state) {
        reduce(state);
        all_reduce(state.world(), at::ones({}), ReduceOp::sum, "next").wait();
      },
      {.sizes = sizes});
  testing::expect_all_contain(errors, part, "");
}

void run_backward(const at::Tensor& table, bool sparse) {
  at::embedding(table, at::arange(2), -1, false, sparse).sum().backward();
}

TEST(AllReduceGrads, WhatAStageOrAnExpertGroupRefusesEndsTheOtherRanks) {
  const auto reduce_table = [](const ParallelState& state, const ParamDescription& description,
                               int64_t rows, bool sparse) {
    testing::DescribedParams net;
    net.add("table", {rows, 2}, description);
    run_backward(net["table"], sparse);
    all_reduce_grads(net, state);
  };
  expect_all_ended(
      {.pipeline = 2},
      [&](const ParallelState& state) { reduce_table(state, {}, 4, state.rank() < 2); },
      "the gradient of 'table' is sparse");
  expect_all_ended(
      {.pipeline = 2},
      [&](const ParallelState& state) {
        reduce_table(state, {}, state.rank() == 1 ? 5 : 4, false);
      },
      "have different parameters: parameter 'table'");
  const ParamDescription expert = {.placements = {{MeshAxis::ep, Shard{0}}}, .is_expert = true};
  expect_all_ended(
      {.expert = 2},
      [&](const ParallelState& state) { reduce_table(state, expert, 4, state.rank() == 0); },
      "the gradient of 'table' is sparse");
}

TEST(AllReduceGrads, WhatRanksOfDpAndCpRefuseEndsTheOtherRanksOfTheMesh) {
  for (const int64_t tp : {2, 4}) {
    const auto reduce_list = [tp](const ParallelState& state, bool sparse, bool with_undefined) {
      std::vector<MeshParameter> list = {
          MeshParameter(at::ones({4, 2}).requires_grad_(true), "table")};
      run_backward(list.front().tensor, sparse);
      if (with_undefined) list.emplace_back(at::Tensor(), "nil");
      all_reduce_grads(list, world_mesh(state, 4 / tp, tp, 1), /*use_ddp=*/false);
    };
    expect_all_ended(
        {}, [&](const ParallelState& state) { reduce_list(state, false, state.rank() == 0); },
        "parameter 1 ('nil'): the tensor is undefined");
    if (tp == 2)
      expect_all_ended(
          {}, [&](const ParallelState& state) { reduce_list(state, state.rank() == 0, false); },
          "the gradient of 'table' is sparse");
  }
}

}  // namespace
}  // namespace lockstep
