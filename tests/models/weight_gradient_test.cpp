// The operators that add a weight's gradient to the buffer that waits for it, and its bits.

#include <gtest/gtest.h>

#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/models/cross_entropy.h"
#include "lockstep/models/embedding.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/models/linear_cross_entropy.h"
#include "lockstep/models/linear_function.h"
#include "lockstep/tests/support/awaited_gradients.h"
#include "lockstep/tests/support/gpt_parts.h"
#include "lockstep/tests/support/operator_counts.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

at::Tensor rippled(at::IntArrayRef shape, double seed, at::ScalarType dtype) {
  const at::Tensor x = at::arange(c10::multiply_integers(shape), at::kDouble);
  return at::sin(x * 0.7 + seed).view(shape).to(dtype);
}

ParallelLinearOptions alone() {
  return {.group = ParallelState::single_process().group(GroupKind::tp)};
}

TEST(WeightGradient, TheProductAddsItToTheBufferOfTheSameDtype) {
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    const at::Tensor weight = rippled({6, 5}, 1, dtype).requires_grad_(true);
    const at::Tensor grad = at::zeros({6, 5}, dtype);
    weight.mutable_grad() = grad;
    int calls = 0;
    testing::count_gradients(weight, calls);
    at::Tensor expected = grad.clone();
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = rippled({7, 2, 5}, step, dtype).requires_grad_(true);
      const at::Tensor of_output = rippled({7, 2, 6}, step + 5, dtype);
      const at::Tensor output = parallel_linear(x, weight, {}, alone());
      {
        const testing::OperatorCounts counts;
        output.backward(of_output);
        EXPECT_EQ(counts.of("aten::addmm_"), 1);
        EXPECT_EQ(counts.of("aten::mm"), 1);  // the gradient of the input
        EXPECT_EQ(counts.of("aten::add_"), 0);
        EXPECT_EQ(counts.of("aten::add"), 0);
      }
      expected = at::addmm(expected, of_output.flatten(0, 1).t(), x.detach().flatten(0, 1));
    }
    EXPECT_EQ(calls, 3);
    EXPECT_TRUE(weight.grad().is_same(grad));
    EXPECT_TRUE(at::equal(grad, expected));
  }
}

/// On some processors oneDNN computes products of the second shape, but adds none: add_product().
TEST(WeightGradient, HasTheSameBitsIfTheBufferGetsItsMemoryLater) {
  for (const auto& [tokens, out, in] :
       std::vector<std::tuple<int64_t, int64_t, int64_t>>{{14, 6, 5}, {48, 256, 96}})
    for (const bool chunked : {false, true}) {
      const auto gradient = [&, t = tokens, o = out, i = in](bool waits_in_memory) {
        const at::Tensor weight = rippled({o, i}, 1, at::kFloat).requires_grad_(true);
        if (waits_in_memory) weight.mutable_grad() = at::zeros({o, i});
        int calls = 0;
        testing::count_gradients(weight, calls);
        const at::Tensor x = rippled({t, i}, 2, at::kFloat).requires_grad_(true);
        const at::Tensor output =
            chunked ? parallel_linear_cross_entropy(x, weight, at::arange(t).remainder(o),
                                                    vocab_partition(o, o, 0, 1), alone(), t / 2)
                    : parallel_linear(x, weight, {}, alone());
        const testing::OperatorCounts counts;
        output.backward(rippled(output.sizes(), 3, at::kFloat));
        if (o < 100) {  // otherwise the processor decides
          EXPECT_EQ(counts.of("aten::addmm_"), chunked ? 2 : 1) << waits_in_memory;
        }
        EXPECT_EQ(calls, 1);
        return weight.grad();
      };
      EXPECT_TRUE(at::equal(gradient(false), gradient(true))) << tokens << " " << chunked;
    }
}

TEST(WeightGradient, ABufferInFp32GetsItWithoutRoundingItFirst) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor weight = rippled({6, 5}, 1, dtype).requires_grad_(true);
    const at::Tensor grad = at::zeros({6, 5});
    weight.mutable_grad() = grad;
    int calls = 0;
    testing::count_gradients(weight, calls);
    at::Tensor exact = at::zeros({6, 5}, at::kDouble);
    for (int step = 0; step < 4; ++step) {
      const at::Tensor x = rippled({300, 5}, step, dtype).requires_grad_(true);
      const at::Tensor of_output = rippled({300, 6}, step + 5, dtype);
      const at::Tensor output = parallel_linear(x, weight, {}, alone());
      const testing::OperatorCounts counts;
      output.backward(of_output);
      EXPECT_EQ(counts.of("aten::addmm_"), 2);  // 256 tokens at a time
      EXPECT_EQ(counts.of("aten::add_"), 0);
      exact.addmm_(of_output.to(at::kDouble).t(), x.detach().to(at::kDouble));
    }
    EXPECT_EQ(calls, 4);
    EXPECT_TRUE(weight.grad().is_same(grad));
    EXPECT_LT(testing::difference(grad.to(at::kDouble), exact), 1e-6);
  }
}

TEST(WeightGradient, ATiedTableGetsThatOfTheOutputByTheProductWhereTheBufferIsWider) {
  const at::Tensor tokens = at::arange(12).remainder(7).view({3, 4});
  for (const auto dtype : {at::kDouble, at::kBFloat16}) {
    ParallelContext context{.options = dtype, .name = "table."};
    const auto loss_of = [&](const VocabParallelEmbedding& table) {
      const at::Tensor logits = table.logits(table.embed(tokens)).flatten(0, 1);
      return at::cross_entropy_loss(logits, tokens.t().flatten(), {}, 2);
    };
    const VocabParallelEmbedding plain(context, 7, 5, 0.3, TableUse::both_ways);
    loss_of(plain).backward();
    const VocabParallelEmbedding table(context, 7, 5, 0.3, TableUse::both_ways);
    const bool narrow = dtype == at::kBFloat16;
    const at::Tensor grad = at::zeros({7, 5}, narrow ? at::kFloat : at::kDouble);
    at::Tensor(table.weight()).mutable_grad() = grad;
    int calls = 0;
    testing::count_gradients(table.weight(), calls);
    const at::Tensor loss = loss_of(table);
    {
      const testing::OperatorCounts counts;
      loss.backward();
      EXPECT_EQ(counts.of("aten::addmm_"), narrow ? 1 : 0);
    }
    EXPECT_EQ(calls, 1);
    EXPECT_TRUE(table.weight().grad().is_same(grad));
    EXPECT_LT(testing::difference(grad, plain.weight().grad()), narrow ? 0.02 : 1e-14);
  }
}

TEST(WeightGradient, ManyUsesOfARowOfANarrowTableAddUpInFp32) {
  constexpr int64_t kUses = 4096;
  for (const auto dtype : {at::kBFloat16, at::kHalf})
    for (const auto ids : {at::kLong, at::kInt}) {
      const ParallelContext context{.options = dtype, .name = "table."};
      const VocabParallelEmbedding table(context, 7, 5, 0.3, TableUse::one_way);
      const at::Tensor& weight = table.weight();
      const auto loss = [&] { return table.embed(at::full({1, kUses}, 3, ids)).sum(); };
      const at::Tensor expected = at::zeros({7, 5});
      expected[3].fill_(kUses);
      loss().backward();
      EXPECT_EQ(weight.grad().scalar_type(), dtype);
      EXPECT_TRUE(at::equal(weight.grad().to(at::kFloat), expected)) << weight.grad();
      at::Tensor(weight).mutable_grad() = at::ones({7, 5});
      int calls = 0;
      testing::count_gradients(weight, calls);
      loss().backward();
      EXPECT_TRUE(at::equal(weight.grad(), expected + 1)) << weight.grad();  // 4,097 in fp32
      EXPECT_EQ(calls, 1);
      const at::Tensor found = torch::autograd::grad({loss()}, {weight})[0];
      EXPECT_TRUE(at::equal(found.to(at::kFloat), expected)) << found;
      EXPECT_TRUE(at::equal(weight.grad(), expected + 1));
    }
}

TEST(WeightGradient, ManyDocumentsThatBeginAddUpInFp32) {
  TransformerConfig config = testing::small_gpt();
  const LayerContext context{.config = config, .options = at::kBFloat16};
  const PositionEmbedding layer(context);
  TokenPositions tokens;
  tokens.document_positions = at::zeros({config.seq_length, 512}, at::kLong);
  layer.forward(tokens, config.seq_length).sum().backward();
  const at::Tensor grad = layer.parameters()[0].grad().to(at::kFloat);
  EXPECT_TRUE(at::equal(grad[0], at::full_like(grad[0], 512. * config.seq_length)));
}

TEST(WeightGradient, OfAModelInAWrapperIsAddedByProductsAlone) {
  for (const auto dtype : {at::kFloat, at::kBFloat16})
    for (const bool chunked : {false, true})
      testing::run_ranks(1, [&](const ParallelState& state) {
        TransformerConfig config = testing::small_gpt();
        config.untie_embeddings_and_output_weights = true;
        if (chunked) config.cross_entropy_chunk_size = 9;
        const auto model = std::make_shared<GPTModel>(config, GPTModelOptions{.dtype = dtype});
        DistributedDataParallel wrapper(*model, state);
        wrapper.zero_grad_buffer();
        wrapper.set_num_microbatches(1);
        const at::Tensor ids = testing::sample_ids(config, 2);
        const at::Tensor loss = model->forward(ids.slice(1, 0, -1), ids.slice(1, 1)).sum();
        const testing::OperatorCounts counts;
        loss.backward();
        // Four matrices per layer and the output layer's; 16 tokens, in two chunks if chunked.
        EXPECT_EQ(counts.of("aten::addmm_"), 4 * config.num_layers + (chunked ? 2 : 1));
      });
}

}  // namespace
}  // namespace lockstep
