// Optimizer::keep_numbers_on_device() on the CPU, where an update reads the same numbers.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/distributed_training.h"
#include "lockstep/tests/support/operator_counts.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::adamw_config;
using testing::DescribedParams;
using testing::OperatorCounts;
using testing::run_ranks;
using testing::throws_with;

/// Whole matrices, at the rate that a recorded step finds in the control, or else in the range.
struct ScaledMatrices final : UpdateRule {
  ScaledMatrices() : UpdateRule({.name = "scaled_matrices", .unit = UpdateUnit::matrix}) {}

  void update(const UpdateRange& range) const override {
    const bool recorded = range.control.numel() > 2;
    const double rate = recorded ? range.control[2].item<double>() : range.learning_rate;
    const at::Tensor grad = range.gradient();
    range.write_weights(range.weights - grad * (rate / grad.norm().item<double>()));
  }
  std::vector<double> step_numbers(double rate, double /*decay*/, int64_t /*step*/) const override {
    return {rate};
  }
};

/// A vector and then a matrix. With muon they are in two buffers, of which only that of the vector
/// has a rule with step_numbers().
class VectorAndMatrix {
 public:
  /// `matrices`: what updates the matrix, rows of which are cut over tp; null: the rule of `kind`.
  VectorAndMatrix(const ParallelState& state, OptimizerKind kind,
                  std::shared_ptr<const UpdateRule> matrices = nullptr) {
    ParamDescription matrix{.update = ParamUpdate::matrix};
    if (matrices) matrix.placements[MeshAxis::tp] = Shard{0};
    net_.add("vector", {5}).add("matrix", {4, 3}, matrix);
    for (const auto& [name, param] : net_.params()) {
      const at::NoGradGuard no_grad;
      at::Tensor(param).copy_(wave(name, param, 0));
    }
    ddp_ = std::make_unique<DistributedDataParallel>(net_, state, DistributedDataParallelConfig{},
                                                     false, MatrixLayout::whole);
    OptimizerConfig config = adamw_config();
    config.optimizer = kind;
    optimizer_ = make_optimizer({ddp_.get()}, config, {}, std::move(matrices));
  }

  Optimizer& optimizer() { return *optimizer_; }

  void step(int number) {
    ddp_->zero_grad_buffer();
    net_.backward([&](const std::string& name, const at::Tensor& param) {
      return wave(name, param, number);
    });
    finalize_model_grads({ddp_.get()}, testing::no_tokens());
    EXPECT_FALSE(optimizer_->step().skipped);
  }

  void expect_same_bits(const VectorAndMatrix& other) const {
    for (const auto& [name, param] : net_.params())
      EXPECT_TRUE(at::equal(param, other.net_[name])) << name << "\n" << param;
  }

 private:
  static at::Tensor wave(const std::string& name, const at::Tensor& like, int phase) {
    const double start = static_cast<double>(name.size()) + phase;
    return at::sin(at::arange(like.numel(), at::kDouble) * 0.37 + start).view(like.sizes());
  }

  DescribedParams net_;
  std::unique_ptr<DistributedDataParallel> ddp_;
  std::unique_ptr<Optimizer> optimizer_;
};

TEST(NumbersOnDevice, ARefusalLeavesTheOptimizerAsItWas) {
  run_ranks(1, [](const ParallelState& state) {
    VectorAndMatrix refused(state, OptimizerKind::muon), plain(state, OptimizerKind::muon);
    EXPECT_TRUE(throws_with<UsageError>([&] { refused.optimizer().keep_numbers_on_device(); },
                                        "the updates of muon cannot be recorded"));
    for (int step = 1; step <= 3; ++step) {
      refused.step(step);
      plain.step(step);
      refused.expect_same_bits(plain);
    }
  });
}

TEST(NumbersOnDevice, AreThoseOfAnOwnRuleOfMatrices) {
  for (const int64_t ranks : {1, 2})
    run_ranks(ranks,
              [](const ParallelState& state) {
                const auto rule = std::make_shared<const ScaledMatrices>();
                VectorAndMatrix kept(state, OptimizerKind::adam, rule),
                    plain(state, OptimizerKind::adam, rule);
                kept.optimizer().keep_numbers_on_device();
                for (int step = 1; step <= 3; ++step) {
                  kept.optimizer().set_learning_rate(0.01 * step);
                  plain.optimizer().set_learning_rate(0.01 * step);
                  kept.optimizer().upload_numbers();
                  kept.step(step);
                  plain.step(step);
                  kept.expect_same_bits(plain);
                }
              },
              {.sizes = {.tensor = ranks}});
}

TEST(NumbersOnDevice, AreUploadedOnlyAfterTheCallThatKeepsThem) {
  run_ranks(1, [](const ParallelState& state) {
    VectorAndMatrix both(state, OptimizerKind::muon);
    for (int attempt = 1; attempt <= 2; ++attempt) {
      EXPECT_TRUE(throws_with<UsageError>([&] { both.optimizer().upload_numbers(); },
                                          "Optimizer::upload_numbers: found a call without"));
      EXPECT_THROW(both.optimizer().keep_numbers_on_device(), UsageError);
    }
  });
}

TEST(NumbersOnDevice, LimitsAreRefused) {
  run_ranks(1, [](const ParallelState& state) {
    VectorAndMatrix both(state, OptimizerKind::adam);
    both.optimizer().keep_numbers_on_device();
    EXPECT_TRUE(throws_with<UsageError>([&] { both.optimizer().start_step({.grad_norm = 1}); },
                                        "Optimizer::start_step: found limits"));
  });
}

TEST(NumbersOnDevice, ASecondCallKeepsTheirMemory) {
  for (const OptimizerKind kind : {OptimizerKind::adam, OptimizerKind::sgd})
    run_ranks(1, [&](const ParallelState& state) {
      VectorAndMatrix twice(state, kind), plain(state, kind);
      const auto zeros_of_a_call = [&] {
        const OperatorCounts counts;
        twice.optimizer().keep_numbers_on_device();
        return counts.of("aten::zeros");
      };
      EXPECT_GT(zeros_of_a_call(), 0);
      for (int step = 1; step <= 3; ++step) {
        EXPECT_EQ(zeros_of_a_call(), 0);
        twice.optimizer().upload_numbers();
        twice.step(step);
        plain.step(step);
        twice.expect_same_bits(plain);
      }
    });
}

}  // namespace
}  // namespace lockstep
