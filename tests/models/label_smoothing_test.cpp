// GPTModel's smoothed loss compared with PyTorch's cross entropy. Megatron Core spreads the share s
// over the other n - 1 token ids, PyTorch over all n: a share of s n / (n - 1) in PyTorch gives the
// same loss.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/models/gpt_model.h"
#include "lockstep/tests/support/gpt_parts.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

constexpr int64_t kSmoothedSamples = 3;
constexpr double kShare = 0.2;

/// Losses [tokens], and the gradients of their sum.
struct SmoothedLosses {
  at::Tensor losses;
  testing::NamedTensors gradients;
};

TransformerConfig smoothed_config() {
  TransformerConfig config = testing::small_gpt();
  config.make_vocab_size_divisible_by = 8;  // 16 rows for 11 token ids
  config.label_smoothing = kShare;
  return config;
}

/// Computed by at::cross_entropy_loss from the logits of one process.
SmoothedLosses by_pytorch(const TransformerConfig& config, double share) {
  const GPTModel model(config, {.dtype = at::kDouble});
  const at::Tensor ids = testing::sample_ids(config, kSmoothedSamples);
  const auto n = static_cast<double>(config.vocab_size);
  SmoothedLosses result;
  result.losses = at::cross_entropy_loss(model.forward(ids.slice(1, 0, -1)).flatten(0, 1),
                                         ids.slice(1, 1).flatten(), /*weight=*/{},
                                         at::Reduction::None, -100, share * n / (n - 1));
  result.losses.sum().backward();
  for (const NamedParameter& param : collect_parameters(model)) {
    const auto& rows = param.description.unpadded_rows;
    result.gradients[param.name] =
        rows ? param.tensor.grad().narrow(0, 0, *rows) : param.tensor.grad();
  }
  return result;
}

/// Bytes of the all-reduces of the loss over tp.
std::vector<int64_t> bytes_of_sums(const testing::CollectiveLog& log) {
  std::vector<int64_t> bytes;
  for (const CollectiveRecord& call : log.of_rank(0))
    if (call.label == "label's logit and sum of exponentials") bytes.push_back(call.bytes);
  return bytes;
}

TEST(LabelSmoothing, IsPyTorchsOnEveryRankOfTensorParallelism) {
  const TransformerConfig config = smoothed_config();
  const SmoothedLosses smoothed = by_pytorch(config, kShare), plain = by_pytorch(config, 0);
  EXPECT_GT(testing::difference(smoothed.losses, plain.losses), 0.01);
  for (const testing::Layout& layout : {testing::Layout{1}, {2}, {2, true}}) {
    SCOPED_TRACE(layout.text());
    testing::CollectiveLog log;
    testing::run_ranks(
        layout.tensor,
        [&](const ParallelState& state) {
          GPTModel model(config, layout.parallel(), state, GPTStage::whole(config),
                         {.dtype = at::kDouble});
          const at::Tensor ids = testing::sample_ids(config, kSmoothedSamples);
          const auto losses = [&] {
            return model.forward(ids.slice(1, 0, -1), ids.slice(1, 1)).flatten();
          };
          const at::Tensor found = losses();
          EXPECT_LT(testing::difference(found, smoothed.losses), 1e-12);
          found.sum().backward();
          model.eval();
          EXPECT_LT(testing::difference(losses(), plain.losses), 1e-12);
          if (layout.sequence) return;
          for (const NamedParameter& param : collect_parameters(model))
            EXPECT_LT(
                testing::difference(testing::join_parts(param.description, param.tensor.grad(),
                                                        state.group(GroupKind::tp)),
                                    smoothed.gradients.at(param.name)),
                1e-12)
                << param.name;
        },
        layout.threads(&log));
    const int64_t tokens = kSmoothedSamples * config.seq_length, element = 8;
    const std::vector<int64_t> sent = {3 * tokens * element, 2 * tokens * element};
    EXPECT_EQ(bytes_of_sums(log), layout.tensor == 1 ? std::vector<int64_t>() : sent);
  }
}

}  // namespace
}  // namespace lockstep
