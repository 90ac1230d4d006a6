// Update rules of whole matrices, on matrices that tensor-parallel ranks hold in pieces (those of
// experts by a size of their own), compared with the same steps on the whole with libtorch's
// operators.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include <ATen/ATen.h>

#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/distributed_training.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::adamw_config;
using testing::DescribedParams;
using testing::kRate;
using testing::run_ranks;
using testing::Setting;
using testing::SmallNet;
using testing::throws_with;

/// Momentum with each matrix scaled to norm 1.
struct UnitMomentum final : UpdateRule {
  UnitMomentum()
      : UpdateRule({.name = "unit_momentum", .state = {{"mean"}}, .unit = UpdateUnit::matrix}) {}

  void update(const UpdateRange& range) const override {
    EXPECT_EQ(range.weights.numel(), range.parameter->tensor.numel());
    const at::Tensor mean = range.state[0] * 0.9 + range.gradient();
    range.write(range.state[0], mean);
    range.write_weights(range.weights - range.learning_rate * mean / mean.norm());
  }
};

struct CutMatrix {
  const char* name;
  std::vector<int64_t> shape;
  std::optional<int64_t> dim = {};
  bool expert = false;

  ParamDescription description() const {
    ParamDescription result = {.is_expert = expert, .update = ParamUpdate::matrix};
    if (dim) result.placements[expert ? MeshAxis::etp : MeshAxis::tp] = Shard{*dim};
    return result;
  }
  at::Tensor whole(double phase) const {
    const at::Tensor zeros = at::zeros(shape, at::kDouble);
    const double own = static_cast<double>(name[0]) + phase;
    return at::sin(at::arange(zeros.numel(), at::kDouble) * 0.37 + own).view(shape);
  }
  at::Tensor piece(const at::Tensor& of_whole, const ParallelState& state) const {
    if (!dim) return of_whole;
    const ProcessGroup tp = state.group(expert ? GroupKind::expert_tp : GroupKind::tp);
    return of_whole.chunk(tp.size(), *dim)[static_cast<size_t>(tp.rank())].contiguous();
  }
};

const std::map<std::string, CutMatrix> kMatrices = {
    {"column", {"column", {4, 3}, 0}},       {"row", {"row", {3, 6}, -1}},
    {"blocks", {"blocks", {2, 4, 3}, 1}},    {"plain", {"plain", {3, 2}}},
    {"expert", {"expert", {4, 6}, 0, true}}, {"down", {"down", {2, 3, 4}, -1, true}}};
constexpr int kCutSteps = 3;

OptimizerConfig unclipped(OptimizerKind kind) {
  OptimizerConfig config = adamw_config(/*clip=*/0);
  config.optimizer = kind;
  config.weight_decay = 0;
  return config;
}

/// This rank's pieces after the steps of `rule`. The data-parallel ranks share the gradients.
std::map<std::string, at::Tensor> stepped(const ParallelState& state, bool distributed,
                                          OptimizerKind kind,
                                          const std::shared_ptr<const UpdateRule>& rule,
                                          at::ScalarType dtype = at::kDouble) {
  DescribedParams module;
  for (const auto& [name, matrix] : kMatrices) {
    const at::Tensor piece = matrix.piece(matrix.whole(0), state);
    module.add(name, piece.sizes().vec(), matrix.description(), dtype);
    const at::NoGradGuard no_grad;
    at::Tensor(module[name]).copy_(piece);
  }
  DistributedDataParallel ddp(module, state, Setting{.distributed = distributed}.ddp(), false,
                              MatrixLayout::whole);
  const auto optimizer = make_optimizer({&ddp}, unclipped(kind), {}, rule);
  for (int step = 1; step <= kCutSteps; ++step) {
    ddp.zero_grad_buffer();
    module.backward([&](const std::string& name, const at::Tensor&) {
      const CutMatrix& matrix = kMatrices.at(name);
      const auto kind = matrix.expert ? GroupKind::expert_dp : GroupKind::dp;
      return matrix.piece(matrix.whole(step), state) /
             static_cast<double>(state.group(kind).size());
    });
    finalize_model_grads({&ddp}, testing::no_tokens());
    EXPECT_FALSE(optimizer->step().skipped);
  }
  ddp.finish_param_sync();
  std::map<std::string, at::Tensor> result;
  for (const auto& [name, param] : module.params()) result[name] = param.detach().clone();
  return result;
}

at::Tensor unit_momentum_by_hand(const CutMatrix& matrix) {
  at::Tensor weights = matrix.whole(0), mean = at::zeros_like(weights);
  for (int step = 1; step <= kCutSteps; ++step) {
    mean = mean * 0.9 + matrix.whole(step);
    weights = weights - kRate * mean / mean.norm();
  }
  return weights;
}

struct CutLayout {
  int64_t world, tensor;
  bool distributed;
  int64_t expert_tensor = tensor;

  std::string text() const {
    return "tp " + std::to_string(tensor) + ", etp " + std::to_string(expert_tensor) + " of " +
           std::to_string(world) + (distributed ? " ranks, distributed" : " ranks");
  }
  testing::RankThreadOptions threads() const {
    return {.sizes = {.tensor = tensor, .expert_tensor = expert_tensor}};
  }
};
const CutLayout kCutLayouts[] = {
    {1, 1, false},   {2, 1, true},     {2, 2, false},    {2, 2, true},    {4, 2, true},
    {4, 2, false},   {2, 2, false, 1}, {2, 2, true, 1},  {2, 1, true, 2}, {2, 1, false, 2},
    {4, 2, true, 1}, {4, 1, true, 2},  {4, 1, false, 2}, {4, 2, true, 4}};

TEST(CutMatrices, ARuleOfOnesOwnGetsThemWhole) {
  for (const auto dtype : {at::kDouble, at::kBFloat16})
    for (const CutLayout& layout : kCutLayouts)
      run_ranks(
          layout.world,
          [&](const ParallelState& state) {
            const double tolerance = dtype == at::kDouble ? 1e-13 : 0.02;
            for (const auto& [name, found] : stepped(state, layout.distributed, OptimizerKind::sgd,
                                                     std::make_shared<UnitMomentum>(), dtype)) {
              const CutMatrix& matrix = kMatrices.at(name);
              const at::Tensor expected = matrix.piece(unit_momentum_by_hand(matrix), state);
              EXPECT_TRUE(at::allclose(found.to(at::kDouble), expected, tolerance, tolerance))
                  << name << ", " << layout.text();
            }
          },
          layout.threads());
}

TEST(CutMatrices, OneCostsAnAllGatherOfWeightsGradientAndEachState) {
  using Bytes = std::map<std::string, int64_t>;
  const Bytes dense = {
      {"matrix of 'column'", 8 * 6}, {"matrix of 'row'", 8 * 9}, {"matrix of 'blocks'", 8 * 12}};
  const Bytes of_experts = {{"matrix of 'expert'", 8 * 12}, {"matrix of 'down'", 8 * 12}};
  for (const auto& [layout, bytes] : {std::pair(CutLayout{2, 2, false, 1}, dense),
                                      std::pair(CutLayout{2, 1, false, 2}, of_experts)}) {
    testing::CollectiveLog log;
    testing::RankThreadOptions threads = layout.threads();
    threads.log = &log;
    run_ranks(
        2,
        [](const ParallelState& state) {
          stepped(state, false, OptimizerKind::sgd, std::make_shared<UnitMomentum>());
        },
        threads);
    std::map<std::string, int> calls;
    for (const auto& call : log.of_rank(0)) {
      if (!call.label.starts_with("matrix of")) continue;
      ASSERT_TRUE(bytes.contains(call.label)) << call.label;
      EXPECT_EQ(call.operation, "all_gather");
      EXPECT_EQ(call.bytes, bytes.at(call.label)) << call.label;
      EXPECT_EQ(call.ranks, (RankList{0, 1}));
      ++calls[call.label];
    }
    for (const auto& [label, own] : bytes) EXPECT_EQ(calls[label], 3 * kCutSteps) << label;
  }
}

TEST(CutMatrices, MuonOfPiecesIsThatOfTheWholeAlsoWhereTheLastDimensionIsCountedFromTheEnd) {
  const auto whole =
      stepped(ParallelState::single_process(), false, OptimizerKind::muon, /*rule=*/nullptr);
  for (const CutLayout& layout : kCutLayouts)
    run_ranks(
        layout.world,
        [&](const ParallelState& state) {
          for (const auto& [name, found] :
               stepped(state, layout.distributed, OptimizerKind::muon, /*rule=*/nullptr)) {
            const at::Tensor expected = kMatrices.at(name).piece(whole.at(name), state);
            EXPECT_TRUE(at::allclose(found, expected, 1e-11, 1e-12))
                << name << ", " << layout.text();
          }
        },
        layout.threads());
}

/// Writes one number, in a tensor whose shape differs from the weights'.
struct Broadcasting final : UpdateRule {
  explicit Broadcasting(UpdateUnit unit) : UpdateRule({.name = "broadcasting", .unit = unit}) {}
  void update(const UpdateRange& range) const override {
    range.write_weights(at::ones({1}, range.weights.options()));
  }
};

TEST(CutMatrices, AValueOfAnotherShapeIsRefusedBeforeItIsWritten) {
  for (const auto unit : {UpdateUnit::range, UpdateUnit::matrix}) {
    SmallNet net(1);
    const auto params =
        testing::with_matrices(net, [](const NamedParameter& p) { return p.tensor.dim() > 1; });
    const testing::Weights before = testing::weights_of(net);
    DistributedDataParallel ddp(params, ParallelState::single_process(), {}, false,
                                MatrixLayout::whole);
    Optimizer optimizer({&ddp}, adamw_config(), {}, std::make_shared<Broadcasting>(unit));
    testing::run_backwards(net, ddp, 0, 1, at::kDouble);
    testing::reduce_gradients(ddp);
    EXPECT_TRUE(throws_with<UsageError>(
        [&] { optimizer.step(); },
        unit == UpdateUnit::matrix
            ? "update rule: parameter 'weight0': found a value of shape [1], allowed: [12]"
            : "update rule: a range of parameters: found a value of shape [1], allowed: ["));
    EXPECT_TRUE(at::equal(net.named_parameters()["weight0"], before[0]));
  }
}

TEST(CutMatrices, RowsThatAreNoWholeBlocksAreRefusedByTheNameOfTheirParameter) {
  DescribedParams module;
  module.add("qkv", {10, 3}, {.update = ParamUpdate::matrix, .rows_of_matrices = {2, 1, 1}});
  DistributedDataParallel ddp(module, ParallelState::single_process(), {}, false,
                              MatrixLayout::whole);
  Optimizer optimizer({&ddp}, unclipped(OptimizerKind::muon));
  ddp.zero_grad();
  module.backward([](const std::string&, const at::Tensor&) { return 1.0; });
  finalize_model_grads({&ddp}, testing::no_tokens());
  EXPECT_TRUE(throws_with<UsageError>([&] { optimizer.step(); },
                                      "parameter 'qkv': muon_direction: found 10 rows, allowed: a "
                                      "multiple of the 4 of a block"));
}

}  // namespace
}  // namespace lockstep
