// Every front, with a module that describes its parameters. Each gradient must match its
// description, compared with plain autograd of the whole model in one process.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/all_reduce_grads.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/distributed/reducer.h"
#include "lockstep/optimizer/clip_grad_norm.h"
#include "lockstep/tests/support/cut_model.h"
#include "lockstep/tests/support/mesh_params.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::backward_of_rank;
using testing::CollectiveLog;
using testing::piece_of;
using testing::pieces_of_rank;
using testing::run_ranks;
using testing::WholeParam;
using testing::WorldLayout;
using enum MeshAxis;
using Lines = std::vector<std::string>;

constexpr auto kSum = GradientState::partial_sum;
constexpr auto kMean = GradientState::partial_mean;
constexpr int kBackwards = 2;

/// One rank's pieces of a model, as a module with descriptions.
class Pieces : public DescribedModule {
 public:
  Pieces(const std::vector<WholeParam>& model, const ParallelState& state)
      : pieces_(pieces_of_rank(model, state)) {
    for (NamedParameter& piece : pieces_) {
      const bool trained = piece.tensor.requires_grad();
      piece.tensor = register_described_parameter(piece.name, piece.tensor, piece.description);
      piece.tensor.requires_grad_(trained);
    }
  }
  const std::vector<NamedParameter>& pieces() const { return pieces_; }

 private:
  std::vector<NamedParameter> pieces_;
};

/// Linear weights that tp cuts, norms that are partial over tp, experts; on every stage or on one.
std::vector<WholeParam> whole_model(const RankGrids& grids) {
  std::vector<WholeParam> model = {
      {"norm", {6}, {.gradient_states = {{tp, kSum}}}},
      {"column", {8, 3}, {.placements = {{tp, Shard{0}}}}},
      {"row", {3, 8}, {.placements = {{tp, Shard{-1}}}}},
      {"plain", {5}},
      {"frozen", {8}, {.placements = {{tp, Shard{0}}}}, {}, /*trained=*/false},
      {"mean", {6}, {.gradient_states = {{tp, kMean}}}},
      {"e_weight", {4, 6, 2}, {.placements = {{ep, Shard{0}}, {etp, Shard{1}}}, .is_expert = true}},
      {"e_bias",
       {4, 3},
       {.placements = {{ep, Shard{0}}}, .gradient_states = {{etp, kSum}}, .is_expert = true}},
      {"e_both", {8, 2}, {.placements = {{ep, Shard{0}}, {etp, Shard{0}}}, .is_expert = true}},
      {"e_plain", {7}, {.is_expert = true}},
      {"e_mean", {9}, {.gradient_states = {{ep, kMean}}, .is_expert = true}},
  };
  if (grids.size(GroupKind::pp) == 1) return model;
  for (WholeParam& param : model) param.description.gradient_states[pp] = kSum;
  for (int64_t stage = 0; stage < grids.size(GroupKind::pp); ++stage) {
    const std::string prefix = "stage" + std::to_string(stage);
    model.push_back({prefix + "table", {4 + 2 * stage}, {.placements = {{tp, Shard{0}}}}, stage});
    model.push_back({prefix + "norm", {3}, {.gradient_states = {{tp, kSum}}}, stage});
  }
  return model;
}

const std::vector<WorldLayout> kLayouts = {
    {2, {}},
    {2, {.tensor = 2}},
    {3, {.tensor = 3, .expert_tensor = 1}},
    {4, {.tensor = 2}},
    {4, {.tensor = 2, .context = 2}},
    {4, {.expert = 2}},
    {4, {.expert = 4}},  // an expert has no replica; its gradient is still divided
    {4, {.tensor = 2, .expert = 2, .expert_tensor = 1}},
    {4, {.expert = 2, .expert_tensor = 2}},
    {4, {.tensor = 2, .pipeline = 2}},
    {4, {.pipeline = 2, .expert = 2}},
};

/// Gradients of the mean over the data-parallel ranks, summed over the micro-batches.
std::map<std::string, at::Tensor> whole_grads(const std::vector<WholeParam>& model,
                                              const RankGrids& grids) {
  std::map<std::string, at::Tensor> params, grads;
  for (const WholeParam& param : model)
    params[param.name] = testing::wave(param, 0).requires_grad_(param.trained);
  for (int m = 0; m < kBackwards; ++m) testing::whole_loss(model, params, grids, m).backward();
  for (const auto& [name, param] : params)
    if (param.requires_grad()) grads[name] = param.grad();
  return grads;
}

void expect_grads(const Pieces& net, const std::vector<WholeParam>& model,
                  const ParallelState& state, const std::map<std::string, at::Tensor>& whole,
                  double factor) {
  for (const NamedParameter& piece : net.pieces()) {
    if (!piece.tensor.requires_grad()) continue;
    const auto param = std::find_if(model.begin(), model.end(),
                                    [&](const WholeParam& p) { return p.name == piece.name; });
    const at::Tensor expected =
        piece_of(whole.at(piece.name), *param, state.grids(), state.rank()) * factor;
    EXPECT_TRUE(at::allclose(piece.tensor.grad(), expected, 1e-12, 1e-14))
        << piece.name << " on rank " << state.rank() << ":\n"
        << piece.tensor.grad() << "\nexpected\n"
        << expected;
  }
}

using Body = std::function<void(Pieces& net, const std::vector<WholeParam>& model,
                                const ParallelState& state)>;

void on_layouts(const Body& body) {
  for (const WorldLayout& layout : kLayouts) {
    SCOPED_TRACE(
        "world " + std::to_string(layout.world) + ", tp " + std::to_string(layout.sizes.tensor) +
        ", cp " + std::to_string(layout.sizes.context) + ", ep " +
        std::to_string(layout.sizes.expert) + ", pp " + std::to_string(layout.sizes.pipeline));
    std::vector<WholeParam> model = whole_model(layout.grids());
    if (layout.world == 3)  // does not divide any dimension
      std::erase_if(model, [](const WholeParam& p) { return p.description.placements.size() > 0; });
    run_ranks(layout.world,
              [&](const ParallelState& state) {
                Pieces net(model, state);
                body(net, model, state);
              },
              {.sizes = layout.sizes});
  }
}

void backwards(const Pieces& net, const std::vector<WholeParam>& model,
               const ParallelState& state) {
  for (int m = 0; m < kBackwards; ++m) backward_of_rank(model, net.pieces(), state, m);
}

TEST(DescribedFronts, GradientSynchronizerGivesTheGradientsOfOneProcess) {
  for (const auto reduction :
       {GradientReduction::sum, GradientReduction::mean, GradientReduction::per_token})
    on_layouts([&](Pieces& net, const auto& model, const ParallelState& state) {
      GradientSynchronizerOptions options = {.reduction = reduction};
      const bool per_token = reduction == GradientReduction::per_token;
      const ProcessGroup batch = state.group(GroupKind::dp_cp);
      if (per_token) options.token_group = batch;
      GradientSynchronizer sync(net, state, /*bucket_size_mb=*/1e-4, kBackwards, options);
      sync.bind();
      for (int step = 0; step < 2; ++step) {
        backwards(net, model, state);
        if (per_token)
          sync.wait(at::full({}, 10 + batch.rank(), at::kLong));
        else
          sync.wait();
        const auto ranks = static_cast<double>(batch.size());
        const double tokens = 10 * ranks + ranks * (ranks - 1) / 2;
        const double factor = reduction == GradientReduction::mean ? 1
                              : per_token                          ? ranks / tokens
                                                                   : ranks;
        expect_grads(net, model, state, whole_grads(model, state.grids()), factor);
        sync.zero_grad();
      }
    });
}

TEST(DescribedFronts, AllReduceGradsGivesTheGradientsOfOneProcess) {
  on_layouts([](Pieces& net, const auto& model, const ParallelState& state) {
    backwards(net, model, state);
    all_reduce_grads(net, state);
    expect_grads(net, model, state, whole_grads(model, state.grids()), 1);
  });
}

TEST(DescribedFronts, ClipGradNormCountsEachElementOfTheModelOnce) {
  on_layouts([](Pieces& net, const auto& model, const ParallelState& state) {
    backwards(net, model, state);
    all_reduce_grads(net, state);
    for (const double p : {2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      const auto whole = whole_grads(model, state.grids());
      std::vector<at::Tensor> all;
      for (const auto& [name, grad] : whole) all.push_back(grad.flatten());
      const double expected = at::cat(all).norm(p).template item<double>();
      const at::Tensor found = clip_grad_norm_(net, state, std::nullopt, p);
      EXPECT_NEAR(found.item<double>(), expected, 1e-12 * expected) << p;
    }
    const auto whole = whole_grads(model, state.grids());
    std::vector<at::Tensor> all;
    for (const auto& [name, grad] : whole) all.push_back(grad.flatten());
    const double norm = at::cat(all).norm().template item<double>();
    clip_grad_norm_(net, state, 0.5 * norm);
    expect_grads(net, model, state, whole, 0.5 * norm / (norm + 1e-6));
  });
}

/// Parameters for which a mean over dp-cp is right.
std::vector<WholeParam> dense_model() {
  return {{"column", {8, 3}, {.placements = {{tp, Shard{0}}}}},
          {"plain", {5}},
          {"row", {3, 8}, {.placements = {{tp, Shard{-1}}}}}};
}

TEST(DescribedFronts, ReducerGivesTheGradientsOfOneProcess) {
  for (const ParallelSizes& sizes : {ParallelSizes{.tensor = 2}, {.tensor = 2, .context = 2}})
    run_ranks(
        4,
        [](const ParallelState& state) {
          std::vector<WholeParam> model = dense_model();
          // If each data-parallel rank has a replica, an expert is reduced over the same ranks.
          model.push_back({"expert", {6, 2}, {.placements = {{etp, Shard{0}}}, .is_expert = true}});
          Pieces net(model, state);
          Reducer reducer(net, state);
          for (int m = 0; m < kBackwards; ++m) {
            Reducer::NoSyncGuard no_sync;
            if (m + 1 < kBackwards) no_sync = reducer.no_sync();
            reducer.prepare_for_forward();
            reducer.prepare_for_backward();
            backward_of_rank(model, net.pieces(), state, m);
          }
          expect_grads(net, model, state, whole_grads(model, state.grids()), 1);
        },
        {.sizes = sizes});
}

/// The sums that a rank has sent: "operation [ranks] bytes".
Lines sums_of(const CollectiveLog& log, int64_t rank) {
  Lines sums = testing::sent_by(log, rank);
  std::erase_if(sums, [](const std::string& call) { return call.find("(sum)") == call.npos; });
  return sums;
}

const std::vector<WholeParam> kSent = {
    {"norm", {6}, {.gradient_states = {{tp, kSum}}}},
    {"column", {8, 3}, {.placements = {{tp, Shard{0}}}}},
    {"plain", {5}},
    {"mean", {2}, {.gradient_states = {{tp, kMean}}}},
    {"e_weight", {4, 2}, {.placements = {{ep, Shard{0}}}, .is_expert = true}}};

struct SentCase {
  ParallelSizes sizes;
  Lines to_all;   ///< sums over all ranks
  Lines to_half;  ///< sums over every second rank
};

TEST(DescribedFronts, WhatIsSentOverWhichRanksFollowsFromTheDescriptions) {
  const SentCase cases[] = {
      // The norm, and the mean, which is divided by tp too. Then 4 rows of 3, the plain parameter
      // and two experts of 2, which have the same ranks and divisor.
      {{.tensor = 2, .expert = 2, .expert_tensor = 1}, {"16", "48"}, {"168"}},
      // All dense parameters; two experts of 2.
      {{.expert = 2}, {"296"}, {"32"}}};
  for (const SentCase& test : cases)
    for (const bool at_once : {false, true}) {
      CollectiveLog log;
      run_ranks(4,
                [&](const ParallelState& state) {
                  Pieces net(kSent, state);
                  if (at_once) {
                    backwards(net, kSent, state);
                    return all_reduce_grads(net, state);
                  }
                  GradientSynchronizer sync(net, state, 1, kBackwards,
                                            {.reduction = GradientReduction::mean});
                  sync.bind();
                  backwards(net, kSent, state);
                  sync.wait();
                },
                {.sizes = test.sizes, .log = &log});
      for (int64_t rank = 0; rank < 4; ++rank) {
        Lines sums = sums_of(log, rank), expected;
        std::sort(sums.begin(), sums.end());
        for (const std::string& bytes : test.to_all)
          expected.push_back("all_reduce (sum) [0 1 2 3] " + bytes);
        for (const std::string& bytes : test.to_half)
          expected.push_back("all_reduce (sum) " +
                             std::string(rank % 2 == 0 ? "[0 2] " : "[1 3] ") + bytes);
        EXPECT_EQ(sums, expected) << "rank " << rank << ", at once " << at_once;
      }
    }
}

TEST(DescribedFronts, ANormSendsEightBytesOverTheRanksThatCut) {
  CollectiveLog log;
  run_ranks(4,
            [&](const ParallelState& state) {
              Pieces net(kSent, state);
              backwards(net, kSent, state);
              clip_grad_norm_(net, state, 1);
            },
            {.sizes = {.tensor = 2, .expert = 2, .expert_tensor = 1}, .log = &log});
  for (int64_t rank = 0; rank < 4; ++rank)
    EXPECT_EQ(testing::sent_by(log, rank),
              Lines({std::string("all_reduce (sum) ") + (rank < 2 ? "[0 1]" : "[2 3]") + " 8"}));
}

/// The parameters above, under a GradientSynchronizer that averages.
struct Averaged {
  explicit Averaged(const ParallelState& state)
      : net(kSent, state),
        params(mesh_parameters(net, state)),
        sync({params}, 1, kBackwards, {.reduction = GradientReduction::mean}) {
    sync.bind();
  }

  Pieces net;
  MeshParameters params;
  GradientSynchronizer sync;
};

TEST(DescribedFronts, AGradientOnAMeshSaysWhatItIs) {
  run_ranks(4,
            [](const ParallelState& state) {
              Averaged averaged(state);
              auto& [net, params, sync] = averaged;
              const auto placements = [&averaged](size_t index) {
                return to_string(averaged.sync.grad(averaged.params[index]).placements());
              };
              backward_of_rank(kSent, net.pieces(), state, 0);
              EXPECT_EQ(placements(0), "(Partial(avg), Partial(avg), Partial(sum))");  // dp, cp, tp
              EXPECT_EQ(placements(1), "(Partial(avg), Partial(avg), Shard(0))");
              EXPECT_EQ(placements(2), "(Partial(avg), Partial(avg), Replicate)");
              EXPECT_EQ(placements(3), "(Partial(avg), Partial(avg), Partial(avg))");
              backward_of_rank(kSent, net.pieces(), state, 1);
              sync.wait();
              EXPECT_EQ(placements(0), "(Replicate, Replicate, Replicate)");
              EXPECT_EQ(placements(1), "(Replicate, Replicate, Shard(0))");
            },
            {.sizes = {.tensor = 2, .expert = 2, .expert_tensor = 1}});
}

TEST(DescribedFronts, AMeanOfAnExpertHasNoPlacementBeforeItIsReduced) {
  run_ranks(4,
            [](const ParallelState& state) {
              Averaged averaged(state);
              auto& [net, params, sync] = averaged;
              EXPECT_TRUE(testing::throws_with<UsageError>(
                  [&] { (void)averaged.sync.grad(averaged.params[4]); },
                  "grad: the gradient of 'e_weight' is a sum over 2 ranks that is divided by 4"));
              backwards(net, kSent, state);
              sync.wait();
              EXPECT_EQ(to_string(sync.grad(params[4]).placements()),
                        "(Replicate, Shard(0), Replicate)");
            },
            {.sizes = {.expert = 2}});
}

}  // namespace
}  // namespace lockstep
