// Ranks of one axis hold pieces of different sizes, or none at all. Reductions over that axis must
// give the same results as one process.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/tests/support/cut_model.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/launch_order.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

using testing::backward_of_rank;
using testing::CollectiveLog;
using testing::DescribedParams;
using testing::errors_of_ranks;
using testing::expect_one_order;
using testing::no_tokens;
using testing::piece_of;
using testing::pieces_of_rank;
using testing::run_ranks;
using testing::WholeParam;
using testing::WholeTraining;
using testing::WorldLayout;
using enum MeshAxis;

constexpr auto kSum = GradientState::partial_sum;
constexpr auto kMean = GradientState::partial_mean;
constexpr int kSteps = 2;

/// Norms that are partial over tp, between tables that tp cuts, and the same for experts. Two or
/// three ranks cut nothing evenly.
std::vector<WholeParam> cut_model(const RankGrids& grids) {
  std::vector<WholeParam> model = {
      {"norm0", {170}, {.gradient_states = {{tp, kSum}}}},
      {"table", {11, 60}, {.placements = {{tp, Shard{0}}}}},
      {"one", {1, 3}, {.placements = {{tp, Shard{0}}}}},
      {"norm1", {133}, {.gradient_states = {{tp, kSum}}}},
      {"plain", {2, 70}},
      {"mean", {150}, {.gradient_states = {{tp, kMean}}}},
      {"e_norm", {140}, {.gradient_states = {{etp, kSum}}, .is_expert = true}},
      {"e_rows", {5, 50}, {.placements = {{ep, Shard{0}}}, .is_expert = true}},
      {"e_columns", {4, 33}, {.placements = {{etp, Shard{1}}}, .is_expert = true}},
      {"frozen", {11}, {.placements = {{tp, Shard{0}}}}, {}, /*trained=*/false},
      {"e_shared", {145}, {.gradient_states = {{ep, kSum}}, .is_expert = true}},
      {"columns", {3, 43}, {.placements = {{tp, Shard{-1}}}}},
      {"e_both", {164}, {.gradient_states = {{etp, kSum}, {ep, kSum}}, .is_expert = true}},
      {"e_part",
       {9, 20},
       {.placements = {{ep, Shard{0}}}, .gradient_states = {{etp, kMean}}, .is_expert = true}},
      {"e_plain", {17}, {.is_expert = true}},
      {"norm2", {264}, {.gradient_states = {{tp, kSum}}}},
  };
  if (grids.size(GroupKind::pp) == 1) return model;
  for (int64_t stage = 0; stage < grids.size(GroupKind::pp); ++stage) {
    const std::string prefix = "stage" + std::to_string(stage);
    model.push_back(
        {prefix + "table", {205 + 102 * stage}, {.placements = {{tp, Shard{0}}}}, stage});
    model.push_back({prefix + "norm", {30}, {.gradient_states = {{tp, kSum}}}, stage});
  }
  for (WholeParam& param : model)  // the others are on all stages; their terms are added
    if (!param.stage) param.description.gradient_states[pp] = kSum;
  return model;
}

const std::vector<WorldLayout> kLayouts = {
    {4, {.tensor = 2}},
    {6, {.tensor = 3}},
    {4, {.expert = 2}},
    {4, {.expert_tensor = 2}},
    {4, {.tensor = 2, .expert_tensor = 1}},
    {8, {.tensor = 2, .expert = 2}},
    {8, {.tensor = 2, .expert = 2, .expert_tensor = 1}},
    {8, {.tensor = 2, .context = 2, .expert = 2, .expert_tensor = 2}},
    {8, {.tensor = 2, .pipeline = 2}},
    {8, {.tensor = 2, .optimizer_instances = 2}},
    {8, {.expert = 2, .expert_tensor = 2, .optimizer_instances = 2}},
};

struct Mode {
  bool distributed;
  bool overlap;
  bool overlap_gather;
  std::optional<int64_t> bucket_size;

  DistributedDataParallelConfig config() const {
    DistributedDataParallelConfig config;
    config.use_distributed_optimizer = distributed;
    config.overlap_grad_reduce = overlap;
    config.overlap_param_gather = overlap_gather;
    config.bucket_size = bucket_size;
    config.calculate_per_token_loss = false;
    return config;
  }
};

const std::vector<Mode> kModes = {
    {false, false, false, {}}, {false, false, false, 150}, {false, true, false, {}},
    {false, true, false, 150}, {true, false, false, {}},   {true, false, false, 150},
    {true, true, false, {}},   {true, true, true, 150},    {true, true, true, 330},
};

/// The gradients that a rank sent in the passes over partial gradients.
struct Passes {
  std::map<RankList, std::vector<int64_t>> bytes;  ///< bytes of each message, by group
};

Passes passes_of(const CollectiveLog& log, int64_t rank) {
  Passes passes;
  for (const CollectiveRecord& call : log.of_rank(rank))
    if (call.label.starts_with("gradients that are"))
      passes.bytes[call.ranks].push_back(call.bytes);
  return passes;
}

/// Bytes of those parameters of `model` on `rank` that are partial over `axis`.
int64_t partial_bytes(const std::vector<WholeParam>& model, MeshAxis axis, const RankGrids& grids,
                      int64_t rank) {
  int64_t numel = 0;
  for (const WholeParam& param : model) {
    const bool lives_there = param.description.is_expert ? axis == etp || axis == ep : axis == tp;
    if (lives_there && testing::on_stage_of(param, grids, rank) &&
        param.description.gradient_state(axis) != GradientState::complete)
      numel += piece_of(testing::wave(param, 0), param, grids, rank).numel();
  }
  return numel * static_cast<int64_t>(sizeof(double));
}

/// All members of a group send the same messages, and the shards of the data-parallel ranks
/// together send each gradient once per step.
void expect_passes(const CollectiveLog& log, const std::vector<WholeParam>& model,
                   const WorldLayout& layout, const Mode& mode) {
  const RankGrids grids = layout.grids();
  for (int64_t rank = 0; rank < layout.world; ++rank)
    for (const auto& [ranks, bytes] : passes_of(log, rank).bytes)
      for (const int64_t member : ranks)
        EXPECT_EQ(passes_of(log, member).bytes.at(ranks), bytes) << rank << " and " << member;
  for (const auto& [axis, kind, shards] :
       {std::tuple{tp, GroupKind::tp, GroupKind::intra_dp_cp},
        std::tuple{etp, GroupKind::expert_tp, GroupKind::intra_expert_dp},
        std::tuple{ep, GroupKind::ep, GroupKind::intra_expert_dp}}) {
    if (grids.size(kind) == 1) continue;
    int64_t sent = 0;
    std::vector<int64_t> holders = {0};
    if (mode.distributed)
      for (holders.clear(); const int64_t rank : grids.group_of(shards, 0)) holders.push_back(rank);
    for (const int64_t rank : holders)
      for (const CollectiveRecord& call : log.of_rank(rank))
        if (call.label.starts_with("gradients that are") &&
            call.label.ends_with(std::string("over ") + to_string(axis)))
          sent += call.bytes;
    EXPECT_EQ(sent, kSteps * partial_bytes(model, axis, grids, 0)) << to_string(axis);
  }
}

void expect_trained_as_one_process(const WorldLayout& layout, const Mode& mode,
                                   const std::string& what) {
  const std::vector<WholeParam> model = cut_model(layout.grids());
  const WholeTraining whole = testing::train_whole(model, std::vector(kSteps, layout.grids()));
  CollectiveLog log;
  run_ranks(layout.world,
            [&](const ParallelState& state) {
              const std::vector<NamedParameter> pieces = pieces_of_rank(model, state);
              DistributedDataParallel ddp(pieces, state, mode.config());
              const auto optimizer = make_optimizer({&ddp}, testing::cut_model_optimizer());
              for (int step = 0; step < kSteps; ++step) {
                ddp.zero_grad_buffer();
                backward_of_rank(model, pieces, state, step);
                finalize_model_grads({&ddp});
                const Optimizer::StepResult result = optimizer->step();
                EXPECT_NEAR(result.grad_norm, whole.norms[static_cast<size_t>(step)], 1e-10)
                    << what;
                EXPECT_EQ(result.num_zeros, whole.zeros[static_cast<size_t>(step)]) << what;
              }
              ddp.finish_param_sync();
              auto piece = pieces.begin();
              for (const WholeParam& param : model) {
                if (!testing::on_stage_of(param, state.grids(), state.rank())) continue;
                const at::Tensor expected =
                    piece_of(whole.params.at(param.name), param, state.grids(), state.rank());
                EXPECT_TRUE(at::allclose(piece->tensor, expected, 1e-11, 1e-12))
                    << what << ": '" << param.name << "' on rank " << state.rank() << "\n"
                    << (piece->tensor - expected).abs().max();
                ++piece;
              }
            },
            {.sizes = layout.sizes, .timeout = std::chrono::seconds(10), .log = &log});
  expect_passes(log, model, layout, mode);
  expect_one_order(log, layout.world, what);
}

TEST(UnevenCuts, TrainAsInOneProcess) {
  for (size_t l = 0; l < kLayouts.size(); ++l)
    for (size_t m = 0; m < kModes.size(); ++m) {
      const std::string what = "layout " + std::to_string(l) + ", mode " + std::to_string(m);
      try {
        expect_trained_as_one_process(kLayouts[l], kModes[m], what);
      } catch (const std::exception& error) {
        ADD_FAILURE() << what << ": " << error.what();
      }
    }
}

/// The parameters of the first report: the shards of both tp ranks have the same size, but hold
/// different elements.
TEST(UnevenCuts, ShardsOfOneSizeThatHoldOtherElementsAreNotAddedUp) {
  CollectiveLog log;
  run_ranks(4,
            [](const ParallelState& state) {
              const auto rows = state.rank() % 2 == 0 ? 129 : 128;  // torch.chunk of 257
              DescribedParams net;
              net.add("p0", {200}, {.gradient_states = {{tp, kSum}}})
                  .add("p1", {64}, {.gradient_states = {{tp, kSum}}})
                  .add("table", {rows}, {.placements = {{tp, Shard{0}}}});
              DistributedDataParallelConfig config;
              config.use_distributed_optimizer = true;
              config.calculate_per_token_loss = false;
              config.bucket_size = 200;
              DistributedDataParallel ddp(net, state, config);
              OptimizerConfig sgd;
              sgd.optimizer = OptimizerKind::sgd;
              sgd.lr = 1;
              sgd.sgd_momentum = sgd.weight_decay = sgd.clip_grad = 0;
              const auto optimizer = make_optimizer({&ddp}, sgd);
              net.backward([&](const std::string& name, const at::Tensor& param) {
                const double first = name == "p0" ? 1 : 1001;
                return (at::arange(param.numel(), at::kDouble) + first) * (1 + state.rank() % 2);
              });
              finalize_model_grads({&ddp});
              optimizer->step();
              EXPECT_TRUE(at::equal(net["p0"], -3 * (at::arange(200, at::kDouble) + 1)));
              EXPECT_TRUE(at::equal(net["p1"], -3 * (at::arange(64, at::kDouble) + 1001)));
            },
            {.sizes = {.tensor = 2}, .log = &log});
  for (const int64_t rank : {0, 1}) {
    int64_t bytes = 0;  // of the shards of ranks rank and rank + 2
    for (const int64_t holder : {rank, rank + 2})
      for (const auto& [ranks, sent] : passes_of(log, holder).bytes) {
        EXPECT_EQ(ranks, (RankList{holder - rank, holder - rank + 1}));
        for (const int64_t message : sent) bytes += message;
      }
    EXPECT_EQ(bytes, (200 + 64) * 8) << rank;
  }
}

/// On a rank without a row of the table, its neighbours are adjacent and form one gradient of more
/// than 256 KiB, which is sent alone.
TEST(UnevenCuts, NeighboursOfAnEmptyPieceAreSentAsOnTheOtherRanks) {
  CollectiveLog log;
  run_ranks(2,
            [](const ParallelState& state) {
              DescribedParams net;
              const ParamDescription partial{.gradient_states = {{tp, kSum}}};
              net.add("a", {20'000}, partial)
                  .add("row", {state.rank() == 0 ? 1 : 0, 3}, {.placements = {{tp, Shard{0}}}})
                  .add("b", {20'000}, partial)
                  .add("plain", {10})
                  .add("c", {100}, partial);
              DistributedDataParallel ddp(net, state);
              net.backward([&](const std::string& name, const at::Tensor& param) {
                return at::arange(param.numel(), at::kDouble).view_as(param) + name.front() +
                       static_cast<double>(state.rank());
              });
              finalize_model_grads({&ddp}, no_tokens());
              for (const char* name : {"a", "b", "c"}) {
                const at::Tensor term =
                    at::arange(net[name].numel(), at::kDouble) + static_cast<double>(*name);
                EXPECT_TRUE(at::equal(net.grad(name), 2 * term + 1)) << name;
              }
            },
            {.sizes = {.tensor = 2}, .timeout = std::chrono::seconds(5), .log = &log});
  int64_t bytes = 0;
  const std::map<RankList, std::vector<int64_t>> sent = passes_of(log, 0).bytes;
  EXPECT_EQ(sent, passes_of(log, 1).bytes);
  for (const int64_t message : sent.at({0, 1})) bytes += message;
  EXPECT_EQ(bytes, 40'100 * 8);
}

TEST(UnevenCuts, WhereRanksHoldTheSameNothingIsPutApart) {
  for (const int64_t rows : {6, 7})
    run_ranks(4,
              [&](const ParallelState& state) {
                const std::vector<WholeParam> model = {
                    {"norm", {70}, {.gradient_states = {{tp, kSum}}}},
                    {"table", {rows, 5}, {.placements = {{tp, Shard{0}}}}},
                    {"plain", {20}}};
                DistributedDataParallel ddp(pieces_of_rank(model, state), state);
                EXPECT_EQ(ddp.buffers().size(), rows == 6 ? 1u : 2u);
                EXPECT_EQ(ddp.buckets().size(), rows == 6 ? 1u : 2u);
              },
              {.sizes = {.tensor = 2}});
}

/// Two parameters of one size on all stages, in buffers whose order differs. Only on the first
/// stage, an earlier parameter shares the buffer of the second one.
TEST(UnevenCuts, StagesMayMakeTheirBuffersInAnotherOrder) {
  for (const bool distributed : {false, true})
    run_ranks(4,
              [&](const ParallelState& state) {
                DescribedParams net;
                const ParamDescription partial{.gradient_states = {{pp, kSum}}};
                if (state.rank() < 2) net.add("first", {8}, {}, at::kFloat);
                net.add("a", {128}, partial, at::kBFloat16).add("b", {128}, partial, at::kFloat);
                DistributedDataParallelConfig config;
                config.use_distributed_optimizer = distributed;
                config.grad_reduce_in_fp32 = true;
                DistributedDataParallel ddp(net, state, config);
                ddp.set_force_all_reduce(distributed);
                net.backward([&](const std::string& name, auto&) {
                  return static_cast<double>((name == "b" ? 16 : 1) << state.rank());
                });
                finalize_model_grads({&ddp}, no_tokens());
                for (const auto& buffer : ddp.buffers())
                  for (size_t i = 0; i < buffer->params().size(); ++i) {
                    const std::string& name = buffer->params()[i].name;
                    if (name == "first") continue;
                    EXPECT_TRUE(buffer->grad_view(i).eq(name == "a" ? 15 : 240).all().item<bool>())
                        << name << " on rank " << state.rank() << ": "
                        << buffer->grad_view(i)[0].item<double>();
                  }
              },
              {.sizes = {.pipeline = 2}});
}

TEST(UnevenCuts, PartialParametersThatDifferAlongTheirAxisAreRefusedByName) {
  const auto errors = errors_of_ranks(
      4,
      [](const ParallelState& state) {
        DescribedParams net;
        net.add("norm", {state.rank() % 2 == 0 ? 5 : 4}, {.gradient_states = {{tp, kSum}}});
        DistributedDataParallel ddp(net, state);
      },
      {.sizes = {.tensor = 2}});
  for (const std::string& error : errors)  // of its own group, or of the other one
    EXPECT_TRUE(error.find("the ranks of group tp [0, 1] have different parameters: parameter "
                           "'norm' is [5] ") != std::string::npos ||
                error.find("the ranks of group tp [2, 3] have different parameters: parameter "
                           "'norm' is [5] ") != std::string::npos)
        << error;
}

TEST(UnevenCuts, MatricesOfMuonAreRefusedByName) {
  const auto errors = errors_of_ranks(
      2,
      [](const ParallelState& state) {
        const std::vector<WholeParam> model = {
            {"even", {4, 3}, {.placements = {{tp, Shard{0}}}, .update = ParamUpdate::matrix}},
            {"uneven", {5, 3}, {.placements = {{tp, Shard{0}}}, .update = ParamUpdate::matrix}}};
        DistributedDataParallelConfig config;
        config.use_distributed_optimizer = true;
        DistributedDataParallel ddp(pieces_of_rank(model, state), state, config,
                                    /*disable_bucketing=*/false, MatrixLayout::whole);
      },
      {.sizes = {.tensor = 2}});
  for (const std::string& error : errors)
    EXPECT_TRUE(
        error.starts_with("the ranks of group tp [0, 1] have different parameters: "
                          "parameter 'uneven' is [3, 3] "))
        << error;
}

TEST(UnevenCuts, ExpertsThatDifferAmongTheirReplicasAreRefusedByName) {
  const auto errors =
      errors_of_ranks(4,
                      [](const ParallelState& state) {
                        DescribedParams net;
                        net.add("expert", {state.rank() == 3 ? 5 : 4},
                                {.placements = {{ep, Shard{0}}}, .is_expert = true});
                        DistributedDataParallel ddp(net, state);
                      },
                      {.sizes = {.expert = 2}, .timeout = std::chrono::seconds(5)});
  for (const size_t rank : {1, 3})
    EXPECT_TRUE(
        errors[rank].starts_with("the ranks of group expert-dp [1, 3] have different "
                                 "parameters: parameter 'expert' is [4] "))
        << errors[rank];
}

}  // namespace
}  // namespace lockstep
