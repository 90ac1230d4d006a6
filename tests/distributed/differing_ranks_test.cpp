// Permitted differences between ranks must not change the sums: which parameters they use, which
// others they hold, which are their own.

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/optimizer/clip_grad_norm.h"
#include "lockstep/optimizer/optimizer.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

TEST(ModelChunks, AParameterThatOneRankDoesNotUseMixesNoGradientsOfDifferentChunks) {
  testing::run_ranks(2, [](const ParallelState& state) {
    DistributedDataParallelConfig config;
    config.allow_unused_parameters = true;
    std::vector<NamedParameter> chunks[2];
    std::vector<std::unique_ptr<DistributedDataParallel>> ddps;
    for (auto& chunk : chunks) {
      for (const char* name : {"a", "b"})
        chunk.push_back({name, at::zeros({4}, at::kDouble).requires_grad_(true), {}});
      ddps.push_back(std::make_unique<DistributedDataParallel>(chunk, state, config));
    }
    for (const auto& ddp : ddps) ddp->zero_grad_buffer();
    at::Tensor loss = (chunks[1][0].tensor * 10).sum();
    if (state.rank() == 1) loss = loss + (chunks[1][1].tensor * 20).sum();
    loss.backward();  // of the last chunk, which stays incomplete on rank 0
    (chunks[0][0].tensor + chunks[0][1].tensor).sum().backward();
    for (const auto& ddp : ddps) ddp->finish_grad_sync();
    const double wanted[2][2] = {{2, 2}, {20, 20}};
    for (size_t chunk = 0; chunk < 2; ++chunk)
      for (size_t i = 0; i < 2; ++i)
        EXPECT_TRUE(
            at::equal(chunks[chunk][i].tensor.grad(), at::full({4}, wanted[chunk][i], at::kDouble)))
            << "chunk " << chunk << ", parameter " << chunks[chunk][i].name << ": "
            << chunks[chunk][i].tensor.grad()[0].item<double>();
  });
}

TEST(ClipGradNorm, PlainTensorsOfARanksOwnBesideACutOneForEveryNorm) {
  testing::run_ranks(2, [](const ParallelState& state) {
    const DeviceMesh mesh(state, {2}, {"dp"});
    const at::Tensor cut = at::ones({1}, at::kDouble).requires_grad_(true);
    const at::Tensor own = at::ones({1}, at::kDouble).requires_grad_(true);
    const double mine = state.rank() == 0 ? 1 : 2;
    (cut + own * mine).sum().backward();
    const MeshParameters list = {{DTensor::from_local(cut, mesh, {Shard{0}}), "cut"}, {own, "own"}};
    for (const double type : {1., 2., 3.})
      EXPECT_NEAR(clip_grad_norm_(list, std::nullopt, type).item<double>(),
                  std::pow(2 + std::pow(mine, type), 1 / type), 1e-12)
          << "norm " << type << " on rank " << state.rank();
  });
}

TEST(GradientSynchronizer, AParameterOfAllStagesIsReducedWhateverAStageHoldsBesides) {
  testing::run_ranks(
      2,
      [](const ParallelState& state) {
        const DeviceMesh mesh(state, {2, 1}, {"pp", "dp"});
        const auto leaf = [](int64_t size, at::ScalarType dtype) {
          return at::ones({size}, dtype).requires_grad_(true);
        };
        const std::vector<Placement> both = {Replicate{}, Replicate{}};
        std::vector<MeshParameter> first, second;
        first.push_back({DTensor::from_local(leaf(3, at::kDouble), mesh, both), "first"});
        if (state.rank() == 1)
          second.push_back({DTensor::from_local(leaf(8, at::kBFloat16), mesh["dp"], {Replicate{}}),
                            "of the second stage"});
        second.push_back({DTensor::from_local(leaf(31, at::kFloat), mesh, both), "second"});
        GradientSynchronizer sync({first, second}, 1, 1);
        sync.bind();
        at::Tensor loss = at::zeros({}, at::kDouble);
        for (const auto* list : {&first, &second})
          for (const MeshParameter& param : *list) loss = loss + param.tensor.sum();
        loss.backward();
        sync.wait();
        EXPECT_TRUE(first[0].tensor.grad().eq(2).all().item<bool>());
        EXPECT_TRUE(second.back().tensor.grad().eq(2).all().item<bool>());
      },
      {.timeout = std::chrono::seconds(5)});
}

/// A module whose children have described parameters.
struct OfUnits : torch::nn::Module {
  testing::DescribedParams& unit(const std::string& name) {
    return *register_module(name, std::make_shared<testing::DescribedParams>());
  }
  OfUnits& part(const std::string& name) {
    return *register_module(name, std::make_shared<OfUnits>());
  }
};

const ParamDescription kPartialOverTp{
    .gradient_states = {{MeshAxis::tp, GradientState::partial_sum}}};

/// 1, 2, ...
at::Tensor counted(int64_t numel) { return at::arange(1, numel + 1, at::kDouble); }

DistributedDataParallelConfig sharded_by_units() {
  DistributedDataParallelConfig config;
  config.use_distributed_optimizer = true;
  config.data_parallel_sharding_strategy = ShardingStrategy::optim_grads_params;
  config.calculate_per_token_loss = false;
  return config;
}

/// Runs a step on a rank of two over tp, whose terms are 1 and 2 times counted(). Expects sums over
/// tp in "norm" only.
void expect_norm_is_added(const OfUnits& model, const ParallelState& state,
                          const std::string& what) {
  const int64_t factor = 1 + state.group(GroupKind::tp).rank();
  DistributedDataParallel ddp(model, state, sharded_by_units());
  ddp.zero_grad_buffer();
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (const at::Tensor& param : model.parameters())
    loss = loss + (param * counted(param.numel()) * factor).sum();
  loss.backward();
  finalize_model_grads({&ddp});
  for (const ParamAndGradBuffer* buffer : ddp.buffers())
    for (size_t i = 0; i < buffer->params().size(); ++i) {
      const std::string& name = buffer->params()[i].name;
      const ParamLayout::Slot& slot = buffer->layout().slots[i];
      const ElementRange own = buffer->owned().front();
      const int64_t start = std::max(own.start, slot.start), end = std::min(own.end, slot.end);
      if (start >= end) continue;
      const at::Tensor terms =
          counted(slot.end - slot.start).slice(0, start - slot.start, end - slot.start);
      EXPECT_TRUE(at::equal(buffer->held_grads({start, end}),
                            terms * (name.ends_with("norm") ? 3 : factor)))
          << what << ": '" << name << "' on rank " << state.rank();
    }
}

TEST(TensorParallelRanks, MayHoldOtherUnitsBesidesThoseThatTheyShare) {
  const std::pair<const char*, std::function<void(OfUnits&, int64_t rank)>> models[] = {
      {"one before",
       [](OfUnits& model, int64_t rank) {
         if (rank == 1) model.unit("own").add("weight", {30});
         model.unit("shared").add("norm", {300}, kPartialOverTp).add("weight", {200});
       }},
      {"one behind",
       [](OfUnits& model, int64_t rank) {
         model.unit("shared").add("norm", {300}, kPartialOverTp).add("weight", {200});
         if (rank == 1) model.unit("own").add("weight", {30});
       }},
      {"the same lengths in other units", [](OfUnits& model, int64_t rank) {
         auto& shared = model.unit("shared").add("norm", {300}, kPartialOverTp);
         (rank == 1 ? model.unit("own") : shared).add("weight", {200});
       }}};
  for (const auto& [what, make] : models) {
    testing::CollectiveLog log;
    testing::run_ranks(4,
                       [&, &name = what, &add = make](const ParallelState& state) {
                         OfUnits model;
                         add(model, state.group(GroupKind::tp).rank());
                         expect_norm_is_added(model, state, name);
                       },
                       {.sizes = {.tensor = 2}, .log = &log});
    for (const int64_t rank : {0, 1}) {
      int64_t bytes = 0;  // of the shards of ranks rank and rank + 2
      for (const int64_t holder : {rank, rank + 2})
        for (const CollectiveRecord& call : log.of_rank(holder))
          if (call.label.starts_with("gradients that are")) bytes += call.bytes;
      EXPECT_EQ(bytes, 300 * 8) << what << ", rank " << rank;
    }
  }
}

TEST(TensorParallelRanks, AreToldIfPartialParametersShareAUnitOnSomeRanksOnly) {
  testing::run_ranks(
      2,
      [](const ParallelState& state) {
        OfUnits model;
        OfUnits& part = model.part("part");
        for (const char* const name : {"a", "b"}) part.unit(name).add("norm", {8}, kPartialOverTp);
        if (state.rank() == 1) part.part("layers").unit("0").add("own", {8});
        EXPECT_TRUE(testing::throws_with<CommunicationError>(
            [&] { DistributedDataParallel(model, state, sharded_by_units()); },
            "the ranks of group tp [0, 1] have different settings: units of the parameters is 0 0 "
            "on rank 0 and 0 1 on rank 1"));
      },
      {.sizes = {.tensor = 2}});
}

/// A model with one parameter, of `dtype` on this rank, and its optimizer.
struct OneWeight {
  OneWeight(const ParallelState& state, at::ScalarType dtype, const OptimizerConfig& config)
      : weight(at::ones({4}, dtype).requires_grad_(true)),
        ddp({{"weight", weight, {}}}, state, {}),
        optimizer({&ddp}, config) {}

  at::Tensor weight;
  DistributedDataParallel ddp;
  Optimizer optimizer;
};

TEST(Optimizer, AllRanksHaveTheLossScaleOfAModelWhoseLastStageAloneIsFp16) {
  testing::RankThreadOptions options;
  options.sizes.pipeline = 2;
  testing::run_ranks(
      2,
      [](const ParallelState& state) {
        OptimizerConfig config;
        config.optimizer = OptimizerKind::sgd;
        config.initial_loss_scale = 64;
        config.lr = 1;
        config.sgd_momentum = config.clip_grad = config.weight_decay = 0;
        OneWeight stage(state, state.rank() == 1 ? at::kHalf : at::kFloat, config);
        EXPECT_EQ(stage.optimizer.loss_scale(), 64);
        stage.ddp.zero_grad_buffer();
        (stage.weight.to(at::kFloat).sum() * stage.optimizer.loss_scale()).backward();
        finalize_model_grads({&stage.ddp}, at::full({}, 1, at::kLong));
        const Optimizer::StepResult result = stage.optimizer.step();
        EXPECT_NEAR(result.grad_norm, std::sqrt(8.), 1e-6);
        EXPECT_TRUE(stage.weight.eq(0).all().item<bool>()) << stage.weight;
      },
      options);
}

TEST(Optimizer, SettingsThatDifferAreNamedOnEveryRankWhateverTheAxis) {
  for (const char* const axis : {"dp", "tp", "pp"}) {
    testing::RankThreadOptions options;
    options.sizes.tensor = axis == std::string("tp") ? 2 : 1;
    options.sizes.pipeline = axis == std::string("pp") ? 2 : 1;
    testing::run_ranks(
        2,
        [&](const ParallelState& state) {
          OptimizerConfig config;
          config.lr = state.rank() == 0 ? 0.5 : 0.25;
          EXPECT_TRUE(testing::throws_with<CommunicationError>(
              [&] { OneWeight(state, at::kFloat, config); },
              "have different settings: optimizer.lr is 0.5 on rank 0 and 0.25 on rank 1"))
              << axis;
        },
        options);
  }
}

}  // namespace
}  // namespace lockstep
