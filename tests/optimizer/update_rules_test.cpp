#include <gtest/gtest.h>

#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/optimizer/orthogonalize.h"
#include "lockstep/optimizer/update_statement.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/distributed_training.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::adamw_config;
using testing::DescribedParams;
using testing::expect_close;
using testing::kDecay;
using testing::kLayers;
using testing::kRate;
using testing::Rates;
using testing::run_ranks;
using testing::Setting;
using testing::SmallNet;
using testing::throws_with;
using testing::train;
using testing::train_plainly;
using testing::Weights;

OptimizerConfig config_of(OptimizerKind kind) {
  OptimizerConfig config = adamw_config();
  config.optimizer = kind;
  return config;
}

bool is_matrix(const NamedParameter& param) {
  return param.tensor.dim() == 2 && param.name != "weight0";
}

const Setting kSettings[] = {
    {.ranks = 1, .distributed = false},
    {.ranks = 2, .microbatches = 2, .distributed = false, .bucket_size = 40},
    {.ranks = 2, .microbatches = 5, .overlap_gather = true, .bucket_size = 40},
    {.ranks = 3, .overlap_reduce = false},
    {.ranks = 4, .instances = 2, .microbatches = 2, .overlap_gather = true, .bucket_size = 60},
    {.ranks = 6, .microbatches = 2, .bucket_size = 1}};

/// Learning rates and weight decay that differ between parameters that are adjacent in memory.
const std::vector<ParamOverride> kGroups = {
    {.applies_to = matches_name("weight1", "bias?"), .max_lr = 0.03},
    {.applies_to = matches_name("weight2", "bias2"), .wd_mult = 2},
    {.applies_to = matches_name("weight0", "weight3"), .max_lr = 0.002, .wd_mult = 0.5}};

Rates rates_of_group(const std::string& name) {
  if (name == "weight1") return {0.03, kDecay};
  if (name == "weight2") return {kRate, 2 * kDecay};
  if (name == "weight0" || name == "weight3") return {0.002, kDecay / 2};
  if (name == "weight4") return {kRate, kDecay};
  return {0.03, name == "bias2" ? 2 * kDecay : 0};
}

/// A configuration, overrides, and the resulting weights.
struct Case {
  OptimizerConfig config;
  std::vector<ParamOverride> overrides;
  Weights expected;
};

void expect_every_setting_follows(const std::vector<Case>& cases, double tolerance) {
  for (const Setting& setting : kSettings)
    run_ranks(
        setting.ranks,
        [&](const ParallelState& state) {
          for (const auto& [config, overrides, expected] : cases)
            expect_close(train(state, setting, config, at::kDouble, is_matrix, overrides), expected,
                         tolerance, setting.text());
        },
        setting.threads());
}

/// The iteration as a polynomial of the singular values.
at::Tensor by_singular_values(const at::Tensor& matrix, int64_t iterations) {
  const double triples[5][3] = {{4.0848, -6.8946, 2.9270},
                                {3.9505, -6.3029, 2.6377},
                                {3.7418, -5.5913, 2.3037},
                                {2.8769, -3.1427, 1.2046},
                                {2.8366, -3.0525, 1.2012}};
  const auto [u, s, v] = at::linalg_svd(matrix, /*full_matrices=*/false);
  at::Tensor x = s / at::linalg_vector_norm(matrix);
  for (int64_t i = 0; i < iterations; ++i) {
    const double* const t = triples[i % 5];
    x = t[0] * x + t[1] * x.pow(3) + t[2] * x.pow(5);
  }
  return u.mm(x.diag()).mm(v);
}

TEST(Muon, OrthogonalizesBySingularValues) {
  for (const auto& [rows, columns] : {std::pair{5, 5}, {3, 8}, {9, 4}, {1, 6}})
    for (const int64_t iterations : {1, 5, 7}) {
      const at::Tensor matrix =
          at::sin(at::arange(rows * columns, at::kDouble) * 1.3).view({rows, columns});
      EXPECT_TRUE(at::allclose(orthogonalize(matrix, iterations),
                               by_singular_values(matrix, iterations), 1e-9, 1e-11))
          << rows << columns << iterations;
    }
  const at::Tensor singular = at::linalg_svdvals(orthogonalize(at::eye(4) * 3, 5));
  EXPECT_TRUE(at::allclose(singular, at::ones({4}), 0.4));
  EXPECT_DOUBLE_EQ(muon_scale(16, 4, MuonScaleMode::spectral), 4);
  EXPECT_DOUBLE_EQ(muon_scale(16, 4, MuonScaleMode::unit_rms_norm), 2);
  EXPECT_DOUBLE_EQ(muon_scale(4, 16, MuonScaleMode::unit_rms_norm), 0.5);
  EXPECT_DOUBLE_EQ(muon_scale(4, 16, MuonScaleMode::shape_scaling), 1);
  EXPECT_DOUBLE_EQ(muon_scale(16, 4, MuonScaleMode::shape_scaling), 2);
}

/// Muon on the parameters that is_matrix() chooses and AdamW on the rest, written out.
class MuonOracle {
 public:
  MuonOracle(const SmallNet& net, bool nesterov, bool groups) : net_(net), nesterov_(nesterov) {
    for (const auto& item : net.named_parameters()) {
      const at::Tensor& param = item.value();
      for (auto* list : {&means_, &squares_}) list->push_back(at::zeros_like(param));
      rates_.push_back(groups ? rates_of_group(item.key())
                              : Rates{kRate, param.dim() > 1 ? kDecay : 0});
    }
  }

  void step() {
    const at::NoGradGuard no_grad;
    ++steps_;
    const auto params = net_.parameters();
    for (size_t i = 0; i < params.size(); ++i) {
      at::Tensor p = params[i];
      const at::Tensor g = p.grad();
      const auto [rate, decay] = rates_[i];
      p.mul_(1 - rate * decay);
      if (p.dim() > 1 && i > 0) {
        means_[i] = 0.95 * means_[i] + 0.05 * g;
        const at::Tensor u = nesterov_ ? 0.05 * g + 0.95 * means_[i] : means_[i];
        const double scale = std::sqrt(static_cast<double>(std::max(p.size(0), p.size(1))));
        p.sub_(rate * scale * 0.5 * by_singular_values(u, 5));
        continue;
      }
      means_[i] = 0.9 * means_[i] + 0.1 * g;
      squares_[i] = 0.95 * squares_[i] + 0.05 * g * g;
      p.sub_(rate * (means_[i] / (1 - std::pow(0.9, steps_))) /
             ((squares_[i] / (1 - std::pow(0.95, steps_))).sqrt() + 1e-8));
    }
  }

 private:
  const SmallNet& net_;
  bool nesterov_;
  std::vector<Rates> rates_;
  Weights means_, squares_;
  int steps_ = 0;
};

TEST(Muon, TwentyStepsFollowTheFormulasInEverySetting) {
  std::vector<Case> cases;
  for (const auto& [nesterov, groups] : {std::pair{false, false}, {true, false}, {true, true}}) {
    const SmallNet net(kLayers);
    MuonOracle muon(net, nesterov, groups);
    const Weights expected = train_plainly(net, [&] { muon.step(); });
    OptimizerConfig config = config_of(OptimizerKind::muon);
    config.muon_use_nesterov = nesterov;
    config.muon_extra_scale_factor = 0.5;
    cases.push_back({config, groups ? kGroups : std::vector<ParamOverride>(), expected});
  }
  expect_every_setting_follows(cases, 1e-9);
}

TEST(Muon, AMatrixThatIsCutOverTensorParallelRanksIsUpdatedAsAWhole) {
  using Shape = std::vector<int64_t>;
  const auto value = [](const Shape& shape, double pace) {
    return at::sin(at::arange(48, at::kDouble) * pace).view(shape);
  };
  const auto run = [&](const ParallelState& state, const Shape& shape,
                       const std::optional<int64_t>& dim) {
    const int64_t tp = state.grids().size(GroupKind::tp);
    const auto part = [&](const at::Tensor& whole) {
      if (!dim) return whole;
      const int64_t rank = state.group(GroupKind::tp).rank();
      return whole.chunk(tp, *dim)[static_cast<size_t>(rank)].contiguous();
    };
    ParamDescription description{.update = ParamUpdate::matrix};
    if (dim) description.placements[MeshAxis::tp] = Shard{*dim};
    DescribedParams module;
    module.add("weight", part(value(shape, 1.1)).sizes().vec(), description);
    {
      const at::NoGradGuard no_grad;
      at::Tensor(module["weight"]).copy_(part(value(shape, 1.1)));
    }
    DistributedDataParallelConfig ddp_config;
    ddp_config.use_distributed_optimizer = true;
    DistributedDataParallel ddp(module, state, ddp_config, /*disable_bucketing=*/false,
                                MatrixLayout::whole);
    OptimizerConfig config = config_of(OptimizerKind::muon);
    config.clip_grad = 0;
    const auto optimizer = make_optimizer({&ddp}, config);
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad_buffer();
      module.backward([&](auto&&, auto&&) { return part(value(shape, 0.7 + step)); });
      finalize_model_grads({&ddp}, at::ones({}));
      optimizer->step();
    }
    return module["weight"].detach().clone();
  };
  const at::Tensor plain = run(ParallelState::single_process(), {8, 6}, {});
  const std::pair<Shape, int64_t> cases[] = {
      {{8, 6}, 0}, {{8, 6}, 1}, {{2, 4, 6}, 1}, {{2, 4, 6}, 2}};
  for (const auto& [shape, dim] : cases)
    run_ranks(4,
              [&, s = shape, d = dim](const ParallelState& state) {
                const at::Tensor found = run(state, s, d);
                const int64_t rank = state.group(GroupKind::tp).rank();
                const at::Tensor expected = plain.view(s).chunk(2, d)[static_cast<size_t>(rank)];
                EXPECT_TRUE(at::allclose(found, expected, 1e-10)) << d;
              },
              {.sizes = {.tensor = 2}});
}

TEST(Muon, WithoutMatricesIsRefusedInsteadOfBecomingAdam) {
  SmallNet net;
  DistributedDataParallel ddp(net, ParallelState::single_process());
  EXPECT_TRUE(throws_with<ConfigError>([&] { Optimizer({&ddp}, config_of(OptimizerKind::muon)); },
                                       "optimizer.optimizer: found muon, but no parameter is a "
                                       "whole matrix"));
}

TEST(Muon, WithoutMatricesIsRefusedOnEveryLayout) {
  for (const ParallelSizes& sizes : {ParallelSizes{.pipeline = 2}, ParallelSizes{.expert = 2}})
    run_ranks(2,
              [](const ParallelState& state) {
                DescribedParams module;
                module.add("weight", {8, 6}, {.update = ParamUpdate::matrix});
                DistributedDataParallel ddp(module, state);  // without MatrixLayout::whole
                EXPECT_TRUE(throws_with<ConfigError>(
                    [&] { Optimizer({&ddp}, config_of(OptimizerKind::muon)); },
                    "optimizer.optimizer: found muon, but no parameter is a whole matrix"));
              },
              {.sizes = sizes});
}

TEST(Muon, AStageWithoutMatricesTakesAdam) {
  run_ranks(2,
            [](const ParallelState& state) {
              const bool first = state.rank() == 0;
              DescribedParams module;
              if (first)
                module.add("weight", {8, 6}, {.update = ParamUpdate::matrix});
              else
                module.add("norm", {6});
              DistributedDataParallel ddp(module, state, {}, /*disable_bucketing=*/false,
                                          MatrixLayout::whole);
              const Optimizer optimizer({&ddp}, config_of(OptimizerKind::muon));
              const std::vector<StateSlice> slices = optimizer.state_slices();
              ASSERT_EQ(slices.size(), 1u);
              EXPECT_EQ(slices[0].values.front().name, first ? "momentum_buffer" : "exp_avg");
            },
            {.sizes = {.pipeline = 2}});
}

TEST(OptimizerConfig, NumbersOutOfTheirBoundsAreNamed) {
  SmallNet net;
  DistributedDataParallel ddp(net, ParallelState::single_process());
  const std::pair<const char*, std::function<void(OptimizerConfig&)>> variants[] = {
      {"optimizer.adam_eps: found 0, allowed: > 0", [](auto& c) { c.adam_eps = 0; }},
      {"optimizer.grad_norm_skip_threshold: found -1, allowed: > 0",
       [](auto& c) { c.grad_norm_skip_threshold = -1; }},
      {"optimizer.muon_extra_scale_factor: found 0, allowed: > 0",
       [](auto& c) { c.muon_extra_scale_factor = 0; }},
      {"optimizer.muon_num_ns_steps: found 0, allowed: >= 1",
       [](auto& c) { c.muon_num_ns_steps = 0; }},
      {"optimizer.lr: found nan, allowed: a finite number", [](auto& c) { c.lr = std::nan(""); }},
      {"optimizer.adam_beta1: found 1, allowed: < 1", [](auto& c) { c.adam_beta1 = 1; }},
      {"optimizer.loss_scale: found 0, allowed: > 0", [](auto& c) { c.loss_scale = 0; }},
      {"optimizer.hysteresis: found 0, allowed: >= 1", [](auto& c) { c.hysteresis = 0; }}};
  for (const auto& [message, set] : variants) {
    OptimizerConfig config = adamw_config();
    set(config);
    EXPECT_TRUE(throws_with<ConfigError>([&] { Optimizer({&ddp}, config); }, message));
  }
}

TEST(Moments, InBf16FollowThoseInFp32AndTakeHalfTheMemory) {
  OptimizerConfig narrow = adamw_config();
  narrow.exp_avg_dtype = narrow.exp_avg_sq_dtype = StateDtype::bf16;
  const Setting setting = {.ranks = 3, .bucket_size = 40};
  run_ranks(3, [&](const ParallelState& state) {
    const Weights expected = train(state, setting, adamw_config(), at::kFloat);
    const Weights found = train(state, setting, narrow, at::kFloat);
    for (size_t i = 0; i < found.size(); ++i) {
      const double most = (found[i] - expected[i]).abs().max().item<double>();
      EXPECT_LT(most, 0.02) << i;  // over 20 steps of 0.01
      EXPECT_GT(most, 0) << i;
    }
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      SmallNet net(kLayers, dtype);
      DistributedDataParallel ddp(net, state, setting.ddp());
      for (const OptimizerConfig& config :
           {adamw_config(), narrow, config_of(OptimizerKind::sgd)}) {
        const DistributedOptimizer optimizer({&ddp}, config);
        const auto bytes = static_cast<int64_t>(at::elementSize(dtype));
        EXPECT_EQ(optimizer.state_bytes(),
                  ddp.buffers()[0]->owned_numel() *
                      state_bytes_of_element(update_statement(config, false), bytes));
      }
    }
  });
  SmallNet net;
  DistributedDataParallel ddp(net, ParallelState::single_process());
  EXPECT_TRUE(throws_with<ConfigError>([&] { Optimizer({&ddp}, narrow); },
                                       "optimizer.exp_avg_dtype: found bf16"));
}

TEST(StateBytes, AreTheFormulas) {
  OptimizerConfig config;
  const auto bytes = [&](OptimizerKind kind, int64_t param_bytes) {
    config.optimizer = kind;
    return state_bytes_of_element(update_statement(config, /*whole_matrices=*/true), param_bytes);
  };
  EXPECT_EQ(bytes(OptimizerKind::adam, 2), 12);
  EXPECT_EQ(bytes(OptimizerKind::adam, 4), 8);
  EXPECT_EQ(bytes(OptimizerKind::adam, 8), 16);
  EXPECT_EQ(bytes(OptimizerKind::muon, 2), 8);
  EXPECT_EQ(bytes(OptimizerKind::sgd, 2), 8);
  config.sgd_momentum = 0;
  EXPECT_EQ(bytes(OptimizerKind::sgd, 4), 0);
  config.exp_avg_dtype = StateDtype::bf16;
  EXPECT_EQ(bytes(OptimizerKind::adam, 2), 10);
}

}  // namespace
}  // namespace lockstep
