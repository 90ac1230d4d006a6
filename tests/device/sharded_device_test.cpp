// Sharded parameters on asynchronous devices: what NCCL gets in a step, and what is on the device
// between steps.

#include <gtest/gtest.h>

#include <memory>

#include "lockstep/core/config_io.h"
#include "lockstep/distributed/block_pool.h"
#include "lockstep/tests/device/device_layouts.h"
#include "lockstep/tests/support/device/device_memory.h"
#include "lockstep/tests/support/device/device_ranks.h"
#include "lockstep/tests/support/sharded_step.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/run_setup.h"

namespace lockstep::testing {
namespace {

const Overrides kParams = {"ddp.use_distributed_optimizer=true", kShardedParams,
                           "model.untie_embeddings_and_output_weights=true"};
constexpr const char* kAhead = "ddp.overlap_param_gather=true";

class ShardedDevice : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { use_lagging_device(); }

  ShardedDevice() : text_(folder_.write("text", synthetic_text())) {}

  Config config(const Overrides& more) const {
    return parse_config(kDeviceModel, "test", with({"data.path=" + text_}, more));
  }

  static DeviceRankOptions options(const Config& config) {
    DeviceRankOptions options;
    options.sizes = parallel_options(config, c10::kCPU).sizes;
    options.rules = std::make_shared<NcclRules>();
    return options;
  }

  TemporaryFolder folder_;
  std::string text_;
};

/// The difference between two counts of a rank, by kind of group.
std::map<std::string, ShardedTraffic> traffic(const NcclCounts& before, const NcclCounts& after) {
  std::map<std::string, ShardedTraffic> found;
  for (const auto& [group, kinds] : after.calls) {
    const auto difference = [&, &group = group](const std::string& kind) {
      const auto count = [&](const NcclCounts& counts) {
        const auto of_group = counts.calls.find(group);
        if (of_group == counts.calls.end() || !of_group->second.contains(kind)) return NcclCalls{};
        return of_group->second.at(kind);
      };
      return NcclCalls{count(after).calls - count(before).calls,
                       count(after).bytes - count(before).bytes};
    };
    const NcclCalls gathers = difference("allgather"), reductions = difference("reduce_scatter");
    found[group.substr(0, group.find('['))] = {gathers.calls, gathers.bytes, reductions.calls,
                                               reductions.bytes};
  }
  return found;
}

struct Case {
  int64_t world;
  Overrides overrides;
  int64_t expert_ranks = 0;  ///< number that hold the same experts
};

TEST_F(ShardedDevice, NcclIsGivenTheBytesOfTheFormula) {
  const Overrides bf16 = {"train.precision=bf16"};
  const Overrides recomputed = {"model.recompute_granularity=full"};
  const Overrides experts = parallel({{"expert_model", 2}}, with(kExperts, bf16));
  for (const Case& one : std::vector<Case>{{2, kDouble},
                                           {2, with(bf16, {kAhead})},
                                           {3, with(bf16, recomputed)},
                                           {4, with(recomputed, {kAhead})},
                                           {4, experts, 2},
                                           {4, with(experts, recomputed), 2}})
    for (const int64_t microbatches : {1, 3}) {
      const auto batch = "train.global_batch_size=" + std::to_string(one.world * microbatches);
      const Config job = config(with(with(kParams, one.overrides), {batch}));
      DeviceRankOptions options = this->options(job);
      std::map<std::string, ShardedTraffic> found;
      std::map<std::string, int64_t> units;
      run_device_ranks(
          one.world,
          [&](const ParallelState& state) {
            Trainer trainer(job, state);
            trainer.train_step();
            trainer.train_step();
            const NcclCounts before = options.rules->counts(state.rank());
            trainer.train_step();
            if (state.rank() != one.world - 1) return;
            found = traffic(before, options.rules->counts(state.rank()));
            units = shard_bytes(trainer);
          },
          options);
      const int64_t widening = job.train.precision == Precision::bf16 ? 2 : 1;
      const auto expected = [&](bool experts, int64_t ranks) {
        return expected_traffic(units, experts, microbatches, ranks, widening,
                                job.ddp.overlap_param_gather);
      };
      EXPECT_EQ(units.size(), one.expert_ranks > 0 ? 11U : 7U);  // 4 layers, of experts in two
      EXPECT_EQ(found["dp-cp"], expected(false, one.world)) << "of " << one.world;
      if (one.expert_ranks > 0) {
        EXPECT_EQ(found["expert-dp"], expected(true, one.expert_ranks));
      }
    }
}

TEST_F(ShardedDevice, ADeviceKeepsEighteenBytesOfAParameterOverTheRanks) {
  const Overrides wide = {"model.hidden_size=64", "model.ffn_hidden_size=128",
                          "train.precision=bf16"};
  for (const int64_t ranks : {2, 3, 4})
    for (const Overrides& more : {Overrides{}, Overrides{kAhead}}) {
      const Config job = config(with(
          with(kParams, wide), with(more, {"train.global_batch_size=" + std::to_string(ranks)})));
      run_device_ranks(
          ranks,
          [&](const ParallelState& state) {
            Trainer trainer(job, state);
            for (int step = 0; step < 3; ++step) trainer.train_step();
            int64_t parameters = 0, unit = 0;  // of the module itself, so padding counts as excess
            for (const at::Tensor& param : trainer.training_model().chunks().front()->parameters())
              parameters += param.numel();
            const BlockPool* pool = nullptr;
            for (const ParamAndGradBuffer* buffer :
                 trainer.training_model().wrappers().front()->buffers()) {
              unit = std::max(unit, buffer->layout().numel);
              pool = buffer->pool();
            }
            const int64_t lent = static_cast<int64_t>(pool->bytes());
            const int64_t kept = device_bytes(state.device().index()).live - lent;
            const int64_t expected = 18 * parameters / ranks;
            EXPECT_GE(kept, expected);
            EXPECT_LE(kept, expected + expected / 100) << "of " << parameters;
            // Two units: weights in bf16, gradients in fp32.
            EXPECT_LE(static_cast<int64_t>(pool->peak_bytes()), 2 * unit * (2 + 4));
          },
          options(job));
    }
}

}  // namespace
}  // namespace lockstep::testing
