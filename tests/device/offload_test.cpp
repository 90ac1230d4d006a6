// Offloaded tensors are not on the device, are saved and loaded like any other state, and are
// refused in configurations that do not support them.

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/checkpoint_saver.h"
#include "lockstep/core/config_io.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/models/activation_offload.h"
#include "lockstep/models/recompute.h"
#include "lockstep/optimizer/optimizer.h"
#include "lockstep/planner/memory_plan.h"
#include "lockstep/tests/device/device_layouts.h"
#include "lockstep/tests/support/device/device_memory.h"
#include "lockstep/tests/support/device/device_ranks.h"
#include "lockstep/tests/support/small_net.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/training/run_setup.h"
#include "lockstep/training/trainer.h"

namespace lockstep::testing {
namespace {

class Offload : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { use_lagging_device(); }

  Offload() : text_(folder_.write("text", synthetic_text())) {}

  Config config(const Overrides& more) const {
    return parse_config(kDeviceModel, "test", with({"data.path=" + text_}, more));
  }

  /// Calls `look` on each rank after two steps.
  void train(int64_t world, const Overrides& more,
             const std::function<void(Trainer&, const ParallelState&)>& look) const {
    const Config config = this->config(more);
    DeviceRankOptions options;
    options.sizes = parallel_options(config, c10::kCPU).sizes;
    run_device_ranks(
        world,
        [&](const ParallelState& state) {
          Trainer trainer(config, state);
          reset_peak_bytes(state.device().index());
          trainer.train_step();
          trainer.train_step();
          look(trainer, state);
        },
        options);
  }

  TemporaryFolder folder_;
  std::string text_;
};

/// `per_element` bytes for each element that this rank updates, including the padding of buffers.
int64_t state_bytes(const Trainer& trainer, int64_t per_element) {
  int64_t numel = 0;
  for (const DistributedDataParallel* model : trainer.training_model().wrappers())
    for (const auto& buffer : model->buffers()) numel += buffer->owned_numel();
  return numel * per_element;
}

TEST_F(Offload, TheDeviceHoldsNoByteOfTheState) {
  const Overrides bf16 = {"train.precision=bf16"};
  const std::vector<std::pair<Overrides, int64_t>> cases = {
      {{}, 8}, {bf16, 12}, {with(kSharded, bf16), 12}};
  for (const auto& [more, per_element] : cases) {
    std::vector<int64_t> kept(2), left(2), state(2);
    const auto note = [&, per_element = per_element](std::vector<int64_t>& live) {
      return [&, per_element](Trainer& trainer, const ParallelState& ranks) {
        (void)trainer.state(/*with_optimizer=*/false);  // parameters are there, and unsharded
        const auto rank = static_cast<size_t>(ranks.rank());
        live[rank] = device_bytes(ranks.device().index()).live;
        state[rank] = state_bytes(trainer, per_element);
        const bool offloads = trainer.config().optimizer.offload;
        for (const StateTensor& tensor : trainer.state(/*with_optimizer=*/true))
          EXPECT_EQ(tensor.values.is_cpu(), offloads && !tensor.state.empty()) << tensor.name;
      };
    };
    train(2, more, note(kept));
    train(2, with(more, {"optimizer.offload=true"}), note(left));
    for (size_t rank = 0; rank < 2; ++rank) {
      EXPECT_GT(state[rank], 10000);
      // Besides the state, the device keeps a few numbers of an update.
      EXPECT_GE(kept[rank] - left[rank], state[rank]) << rank;
      EXPECT_LE(kept[rank] - left[rank], state[rank] + 2048) << rank;
    }
  }
}

/// Each of 24 layers would keep 8 * 16 * 16 elements of fp32; at most two are on the device.
TEST_F(Offload, TheDeviceKeepsNoInputsOfRecomputedLayers) {
  const Overrides deep = {"model.num_layers=24", "model.recompute_granularity=full",
                          "train.micro_batch_size=8"};
  int64_t kept = 0, offloaded = 0;
  const auto peak = [](int64_t& bytes) {
    return [&bytes](Trainer&, const ParallelState& ranks) {
      bytes = device_bytes(ranks.device().index()).peak;
    };
  };
  train(1, deep, peak(kept));
  train(1, with(deep, {"model.offload_activations=true"}), peak(offloaded));
  const int64_t input = int64_t{8} * 16 * 16 * 4;
  EXPECT_GE(kept - offloaded, 20 * input);
  EXPECT_LE(kept - offloaded, 24 * input);
}

/// Of 24 layers that keep everything, two are on the device at a time. The plan for CUDA holds for
/// the test device in fp32.
TEST_F(Offload, TheDeviceKeepsTwoLayersAtATime) {
  for (const char* more : {"model.recompute_granularity=none",
                           "model.recompute_granularity=selective", "model.num_experts=2"}) {
    const Overrides deep = {"model.num_layers=24", "train.micro_batch_size=8", more};
    int64_t kept = 0, offloaded = 0;
    const auto peak = [](int64_t& bytes) {
      return [&bytes](Trainer&, const ParallelState& ranks) {
        bytes = device_bytes(ranks.device().index()).peak;
      };
    };
    train(1, deep, peak(kept));
    const Overrides on_host = with(deep, kOffloadedLayers);
    train(1, on_host, peak(offloaded));
    const auto plan = [&](const Overrides& of) {
      return plan_memory(config(with(of, {"train.device=cuda"})), 1).stages.front();
    };
    const int64_t layer = plan(on_host).host_bytes / 24;
    EXPECT_GT(layer, 8 * 8 * 16 * 16 * 4) << more;
    EXPECT_LE(kept - offloaded, 24 * layer) << more;
    // Except for the order of the experts' rows, which lives as long as the graph.
    const int64_t saved = plan(deep).activation_bytes - plan(on_host).activation_bytes;
    EXPECT_GE(kept - offloaded, saved - saved / 50) << more;
    EXPECT_LE(kept - offloaded, saved + 2 * layer) << more;
  }
}

TEST_F(Offload, CheckpointsAreThoseOfOtherRuns) {
  const Overrides base = with(kSharded, {"train.precision=bf16", "train.train_iters=4"});
  const Overrides offloaded = with(base, kOffloaded);
  std::map<std::string, std::vector<double>> losses;
  const auto run = [&](const std::string& name, const Overrides& settings, const std::string& from,
                       const std::string& to) {
    const Config config = this->config(settings);
    DeviceRankOptions options;
    options.sizes = parallel_options(config, c10::kCPU).sizes;
    run_device_ranks(
        2,
        [&](const ParallelState& state) {
          Trainer trainer(config, state);
          if (!from.empty()) {
            CheckpointReader reader(complete_checkpoints(from).front());
            trainer.load(reader, /*weights_only=*/false);
          }
          std::vector<double> found;
          for (int step = 0; step < 2; ++step) found.push_back(trainer.train_step().lm_loss);
          if (!to.empty()) {
            CheckpointSaver saver(state, {.folder = to, .async = true});
            saver.save(trainer.state(/*with_optimizer=*/true), trainer.progress(), config, false);
            found.push_back(trainer.train_step().lm_loss);  // while the save is being written
            saver.finish();
          }
          if (state.rank() == 0) losses[name] = found;
        },
        options);
  };
  const std::string plain = folder_.path() / "plain", host = folder_.path() / "host";
  run("plain", base, "", plain);
  run("host", offloaded, "", host);
  EXPECT_EQ(losses["plain"], losses["host"]);
  run("plain of plain", base, plain, "");
  run("host of plain", offloaded, plain, "");
  run("plain of host", base, host, "");
  run("host of host", offloaded, host, "");
  EXPECT_EQ(losses["plain of plain"].front(), losses["plain"].back());
  for (const char* const other : {"host of plain", "plain of host", "host of host"})
    EXPECT_EQ(losses[other], losses["plain of plain"]) << other;
}

/// fp32 weights have no master weights: the device's values count, whoever wrote them.
TEST_F(Offload, WeightsThatAreChangedOnTheDeviceStayChanged) {
  std::map<std::string, std::vector<double>> losses;
  for (const char* const offload : {"false", "true"})
    train(1, {std::string("optimizer.offload=") + offload},
          [&](Trainer& trainer, const ParallelState&) {
            {
              const at::NoGradGuard no_grad;
              for (const auto& chunk : trainer.training_model().chunks())
                for (const NamedParameter& param : collect_parameters(*chunk))
                  at::Tensor(param.tensor).mul_(0.5);
            }
            for (int step = 0; step < 2; ++step)
              losses[offload].push_back(trainer.train_step().lm_loss);
          });
  EXPECT_EQ(losses["true"], losses["false"]);
}

/// Replicas, and the part that each rank keeps, are compared, with state on both sides.
TEST_F(Offload, CopiesAreCompared) {
  train(2, {"optimizer.offload=true", "train.replica_check_interval=1", "train.precision=bf16"},
        [](Trainer& trainer, const ParallelState& state) {
          EXPECT_NO_THROW(trainer.train_step());
          if (state.rank() == 1) {
            const StateTensor last = trainer.state(/*with_optimizer=*/true).back();
            at::Tensor(last.values).view(at::kInt).slice(0, 0, 1).bitwise_xor_(1);
          }
          EXPECT_TRUE(throws_with<CommunicationError>([&] { trainer.train_step(); }, "rank 1"));
        });
}

TEST_F(Offload, BackwardInAnotherOrderFindsItsInputs) {
  const c10::Device device = lagging_device(0);
  ActivationOffload offload(device);
  const auto cube = [](const std::vector<at::Tensor>& in) { return in[0].pow(3); };
  std::vector<at::Tensor> inputs, values;
  for (int i = 0; i < 4; ++i) {
    if (i % 2 == 0) offload.begin_pass();
    inputs.push_back(at::full({64}, i + 1.0, device).requires_grad_(true));
    values.push_back(recompute(cube, {inputs.back() * 2}, &offload));
  }
  for (const size_t i : {0, 3, 1, 2}) {
    values[i].sum().backward();
    const double x = static_cast<double>(i) + 1;
    EXPECT_TRUE(at::equal(inputs[i].grad().cpu(), at::full({64}, 24 * x * x))) << i;
  }
}

TEST_F(Offload, WhatCannotBeOffloadedIsNamed) {
  const auto refuses = [&](const Overrides& more, const std::string& text) {
    EXPECT_TRUE(throws_with<ConfigError>([&] { config(more); }, text));
  };
  refuses({"optimizer.offload=true", "optimizer.optimizer=muon"},
          "optimizer.offload: found true, and optimizer.optimizer = muon; allowed: false, or adam "
          "or sgd");
  refuses({"optimizer.offload=true", "train.cuda_graph=step"},
          "optimizer.offload: found true, and train.cuda_graph = step; allowed: false");
  refuses({"model.offload_activations=true", "model.recompute_granularity=full",
           "train.cuda_graph=microbatch"},
          "model.offload_activations: found true, and train.cuda_graph = microbatch");
}

struct WholeMatrices : UpdateRule {
  WholeMatrices() : UpdateRule({.name = "halves", .unit = UpdateUnit::matrix}) {}
  void update(const UpdateRange& range) const override { range.write_weights(range.weights * 0.5); }
};

struct Halves : UpdateRule {
  Halves() : UpdateRule({.name = "halves"}) {}
  void update(const UpdateRange& all) const override {
    EXPECT_TRUE(all.weights.is_cpu() && all.grad.is_cpu() && all.control.is_cpu());
    for (const auto& segment : all.segments) {
      const UpdateRange range = all.part(segment);
      range.write_weights(range.weights * 0.5);
    }
  }
};

TEST_F(Offload, RulesOfOnesOwnUpdateOnTheHost) {
  run_device_ranks(1, [](const ParallelState& state) {
    OptimizerConfig config;
    config.offload = true;
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      SmallNet net(2, dtype, state.device());
      DistributedDataParallel ddp(net, state, {});
      Optimizer optimizer({&ddp}, config, {}, std::make_shared<Halves>());
      EXPECT_TRUE(optimizer.is_offloaded());
      EXPECT_TRUE(throws_with<UsageError>([&] { optimizer.keep_numbers_on_device(); },
                                          "optimizer.offload = true"));
      const at::Tensor before = ddp.buffers()[0]->param_data().cpu();
      const at::Tensor input = SmallNet::samples(0, 4, dtype).to(state.device());
      net.loss(input).backward();
      finalize_model_grads({&ddp}, at::full({}, 4));
      optimizer.step();
      EXPECT_TRUE(at::equal(ddp.buffers()[0]->param_data().cpu(), before * 0.5)) << dtype;
    }
  });
}

TEST_F(Offload, ARuleOfMatricesIsRefused) {
  run_device_ranks(1, [](const ParallelState& state) {
    OptimizerConfig config;
    config.offload = true;
    SmallNet net(2, at::kFloat, state.device());
    DistributedDataParallel ddp(net, state, {});
    const auto make = [&] {
      Optimizer optimizer({&ddp}, config, {}, std::make_shared<WholeMatrices>());
    };
    EXPECT_TRUE(throws_with<ConfigError>(make, "update rule halves updates whole matrices"));
  });
}

}  // namespace
}  // namespace lockstep::testing
