#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include "lockstep/models/moe_layer.h"
#include "lockstep/tests/support/rank_threads.h"

// The shared expert's products run during the all-to-all of the tokens.

namespace lockstep {
namespace {

using testing::RankThreadOptions;
using testing::run_ranks;

constexpr int64_t kOverlapHidden = 6, kSharedWidth = 10;  // no other matrix has 2 * 10 rows

LayerContext overlap_context(const ParallelState& state, bool sequence_parallel, bool shared) {
  TransformerConfig config;
  config.hidden_size = kOverlapHidden;
  config.ffn_hidden_size = 12;
  config.moe_ffn_hidden_size = 12;
  config.num_experts = 4;
  config.init_method_std = 0.5;
  if (shared) config.moe_shared_expert_intermediate_size = kSharedWidth;
  LayerContext context{.config = config, .options = at::TensorOptions(at::kDouble), .name = "mlp."};
  context.parallel.sequence_parallel = sequence_parallel;
  context.parallel.tensor_model_parallel_size = state.grids().size(GroupKind::tp);
  context.state = state;
  return context;
}

at::Tensor overlap_input(int64_t rank) {
  const at::Tensor i = at::arange(8 * 2 * kOverlapHidden, at::kDouble);
  return at::sin(i * 1.7 + static_cast<double>(rank))
      .view({8, 2, kOverlapHidden})
      .clone()
      .requires_grad_(true);
}

/// Calls `see` on this thread before each product with the matrix of the shared expert's first
/// layer.
class SharedExpertProducts {
 public:
  explicit SharedExpertProducts(std::function<void()> see) {
    seen() = std::move(see);
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&SharedExpertProducts::note).needsInputs(true));
  }
  ~SharedExpertProducts() { at::removeCallback(handle_); }
  SharedExpertProducts(const SharedExpertProducts&) = delete;
  SharedExpertProducts& operator=(const SharedExpertProducts&) = delete;

 private:
  static std::function<void()>& seen() {
    static thread_local std::function<void()> see;
    return see;
  }
  static std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& function) {
    const std::string name = function.name();
    const std::vector<int64_t> shape = {2 * kSharedWidth, kOverlapHidden};
    if (name == "aten::mm" || name == "aten::linear")
      for (const c10::IValue& input : function.inputs())
        if (input.isTensor() && input.toTensor().sizes() == shape) seen()();
    return nullptr;
  }

  at::CallbackHandle handle_;
};

/// Rank 0 computes. Rank 1 holds back its tokens, or gradients, until rank 0 has done so.
TEST(MoEOverlap, TheSharedExpertIsComputedWhileTokensAndGradientsAreUnderWay) {
  const std::vector<std::string> held = {"tokens of the experts",
                                         "gradient of tokens of the experts"};
  std::vector<std::promise<void>> computed(held.size());
  std::atomic<size_t> phase = 0;
  std::vector<bool> in_time;
  std::vector<std::string> order;  // of rank 0
  RankThreadOptions options;
  options.sizes.expert = 2;
  options.observer = [&](const CollectiveRecord& call) {
    if (call.rank == 0) order.push_back(call.operation + " of " + call.label);
    for (size_t i = 0; i < held.size(); ++i)
      if (call.rank == 1 && call.label == held[i])
        in_time.push_back(computed[i].get_future().wait_for(std::chrono::seconds(15)) ==
                          std::future_status::ready);
  };
  run_ranks(
      2,
      [&](const ParallelState& state) {
        const MoELayer layer(overlap_context(state, false, true));
        std::vector<bool> told(held.size());
        const SharedExpertProducts products([&] {
          if (state.rank() != 0 || told[phase]) return;
          order.emplace_back("shared expert");
          computed[phase].set_value();
          told[phase] = true;
        });
        const at::Tensor output = layer.forward(overlap_input(state.rank()));
        if (state.rank() == 0) phase = 1;
        output.sum().backward();
      },
      options);
  EXPECT_EQ(in_time, (std::vector<bool>{true, true}));
  EXPECT_EQ(order, (std::vector<std::string>{
                       "all_gather of numbers of tokens", "all_to_all of tokens of the experts",
                       "shared expert", "all_to_all of outputs of the experts",
                       "all_to_all of gradient of outputs of the experts",
                       "all_to_all of gradient of tokens of the experts", "shared expert"}));
}

TEST(MoEOverlap, TheBitsAreThoseOfALayerAndAnMLPOneAfterTheOther) {
  for (const bool sequence_parallel : {false, true})
    run_ranks(4,
              [&](const ParallelState& state) {
                const MoELayer both(overlap_context(state, sequence_parallel, true));
                const LayerContext context = overlap_context(state, sequence_parallel, false);
                const MoELayer routed(context);
                const MLP shared(context.child("shared_experts"), kSharedWidth);
                const at::Tensor x = overlap_input(state.rank() / 2), y = x.detach().clone();
                const at::Tensor output = both.forward(x);
                output.square().sum().backward();
                const at::Tensor first = routed.forward(y.requires_grad_(true));
                const at::Tensor expected = first + shared.forward(y);
                expected.square().sum().backward();
                EXPECT_TRUE(at::equal(output, expected));
                EXPECT_TRUE(at::equal(x.grad(), y.grad()));
                std::vector<NamedParameter> apart = collect_parameters(routed);
                for (const NamedParameter& param : collect_parameters(shared))
                  apart.push_back(param);
                const auto together = collect_parameters(both);
                ASSERT_EQ(together.size(), apart.size());
                for (size_t i = 0; i < apart.size(); ++i)
                  EXPECT_TRUE(at::equal(together[i].tensor.grad(), apart[i].tensor.grad())) << i;
              },
              {.sizes = {.tensor = 2, .expert = 2, .expert_tensor = 1}});
}

}  // namespace
}  // namespace lockstep
