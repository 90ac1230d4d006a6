// Muon on the fused weight of queries, keys and values. Megatron Core splits it into the three; see
// scripts/golden/muon_split_qkv.py.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/optimizer/orthogonalize.h"
#include "lockstep/tests/support/gpt_parts.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

constexpr const char* kQkv = "decoder.layers.0.self_attention.linear_qkv.weight";

/// One of Megatron Core's cases.
struct FusedCase {
  explicit FusedCase(const nlohmann::json& json)
      : heads(json["heads"]),
        groups(json["groups"]),
        channels(json["channels"]),
        columns(json["columns"]),
        split(json["split"]) {
    const auto values = json["direction"].get<std::vector<double>>();
    direction = at::tensor(values, at::kDouble).view({-1, columns});
    const at::Tensor i = at::arange(direction.numel(), at::kDouble);
    matrix = at::sin(i * i * 0.7).view({-1, columns});
  }

  /// The configuration of a GPTModel with these sizes.
  TransformerConfig model() const {
    TransformerConfig config = testing::small_gpt();
    config.num_layers = 1;
    config.hidden_size = columns;
    config.num_attention_heads = heads;
    config.num_query_groups = groups;
    config.kv_channels = channels;
    config.position_embedding_type = PositionEmbeddingType::none;
    return config;
  }

  OptimizerConfig optimizer() const {
    OptimizerConfig config;
    config.optimizer = OptimizerKind::muon;
    config.muon_split_qkv = split;
    config.lr = 0.5;
    config.weight_decay = config.clip_grad = 0;
    return config;
  }

  int64_t heads, groups, channels, columns;
  bool split;
  at::Tensor matrix, direction;
};

std::vector<FusedCase> fused_cases() {
  std::ifstream file(LOCKSTEP_SOURCE_DIR "/tests/optimizer/muon_split_qkv_golden.json");
  std::vector<FusedCase> cases;
  for (const auto& json : nlohmann::json::parse(file)) cases.emplace_back(json);
  return cases;
}

TEST(MuonSplitQkv, DirectionIsMegatronCores) {
  const auto cases = fused_cases();
  EXPECT_EQ(cases.size(), 8U);
  for (const FusedCase& one : cases) {
    const int64_t query = one.heads / one.groups * one.channels;
    EXPECT_LT(testing::difference(
                  muon_direction(one.matrix, one.optimizer(), {query, one.channels, one.channels}),
                  one.direction),
              1e-9)
        << one.heads << " " << one.groups << " " << one.split;
  }
  EXPECT_GT(testing::difference(cases[0].direction, cases[1].direction), 0.1);
}

/// The change of this rank's weight in a step with the gradient of `one`.
at::Tensor change_of_qkv(const FusedCase& one, const ParallelState& state, bool distributed) {
  const ProcessGroup tp = state.group(GroupKind::tp);
  ParallelConfig parallel;
  parallel.tensor_model_parallel_size = tp.size();
  GPTModel model(one.model(), parallel, state, GPTStage::whole(one.model()),
                 {.dtype = at::kDouble});
  DistributedDataParallelConfig ddp_config;
  ddp_config.use_distributed_optimizer = distributed;
  DistributedDataParallel ddp(model, state, ddp_config, /*disable_bucketing=*/false,
                              MatrixLayout::whole);
  const auto optimizer = make_optimizer({&ddp}, one.optimizer());
  const at::Tensor weight = model.named_parameters()[kQkv];
  const at::Tensor before = weight.detach().clone();
  const int64_t rows = weight.size(0);
  ddp.zero_grad_buffer();
  at::Tensor sum = at::zeros({}, at::kDouble);
  for (const at::Tensor& param : model.parameters())
    sum =
        sum + (param.is_same(weight) ? (param * one.matrix.narrow(0, tp.rank() * rows, rows)).sum()
                                     : param.sum() * 0);
  sum.backward();
  finalize_model_grads({&ddp}, at::full({}, 1.0 / state.group(GroupKind::dp).size()));
  optimizer->step();
  return (weight.detach() - before) / -0.5;
}

TEST(MuonSplitQkv, AStepOfGptIsMegatronCoresOnEveryLayout) {
  // The momentum of a first step is a multiple of the gradient, so its direction is the same.
  for (const FusedCase& one : fused_cases())
    for (const int64_t tensor : {1, 2})
      for (const bool distributed : {false, true}) {
        if (one.heads % tensor != 0) continue;
        SCOPED_TRACE(fmt::format("{} heads, {} groups, split {}, tp {}, distributed {}", one.heads,
                                 one.groups, one.split, tensor, distributed));
        const testing::Layout layout{.tensor = tensor};
        testing::run_ranks(
            2 * tensor,
            [&](const ParallelState& state) {
              const at::Tensor found = change_of_qkv(one, state, distributed);
              const int64_t rank = state.group(GroupKind::tp).rank();
              EXPECT_LT(testing::difference(
                            found, one.direction.narrow(0, rank * found.size(0), found.size(0))),
                        1e-8);
            },
            layout.threads());
      }
}

TEST(MuonSplitQkv, TheDescriptionHasTheRowsOfAQueryGroup) {
  for (const FusedCase& one : fused_cases()) {
    TransformerConfig config = one.model();
    config.add_qkv_bias = true;
    const GPTModel model(config, {.dtype = at::kDouble});
    for (const NamedParameter& param : collect_parameters(model)) {
      const std::vector<int64_t> rows = {one.heads / one.groups * one.channels, one.channels,
                                         one.channels};
      EXPECT_EQ(param.description.rows_of_matrices,
                param.name == kQkv ? rows : std::vector<int64_t>())
          << param.name;
    }
  }
}

TEST(MuonSplitQkv, RowsThatAreNoWholeBlocksAreNamed) {
  OptimizerConfig config;
  EXPECT_TRUE(testing::throws_with<UsageError>(
      [&] {
        muon_direction(at::ones({10, 3}), config, {2, 1, 1});
      },
      "muon_direction: found 10 rows, allowed: a multiple of the 4 of a block"));
}

}  // namespace
}  // namespace lockstep
