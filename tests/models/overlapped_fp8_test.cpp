// Linear layers in 8-bit floats whose forward sends in parts, compared with the same without parts.

#include <string>
#include <vector>

#include "lockstep/core/check.h"
#include "lockstep/models/linear.h"
#include "lockstep/tests/models/fp8_operands.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::run_ranks;

/// Steps of layers in 8-bit floats: outputs and scales of rank 0, and its number of calls.
struct Fp8Steps {
  std::vector<at::Tensor> found;
  std::vector<int64_t> sent;
};

Fp8Steps fp8_steps(Fp8Recipe recipe, bool sequence, bool overlap) {
  Fp8Steps steps;
  CollectiveLog log;
  testing::RankThreadOptions options;
  options.sizes.tensor = 2;
  options.log = &log;
  run_ranks(
      2,
      [&](const ParallelState& state) {
        const auto format = recipe == Fp8Recipe::rowwise ? Fp8Format::e4m3 : Fp8Format::hybrid;
        const auto scaling =
            testing::scaling_of(testing::options(recipe, format), state.group(GroupKind::tp_cp));
        const ParallelContext context = {.state = state,
                                         .options = at::kFloat,
                                         .sequence_parallel = sequence,
                                         .tp_comm_overlap = overlap,
                                         .name = "mlp.",
                                         .fp8 = scaling};
        const ColumnParallelLinear up(context.child("up"), 32, {64}, true, 0.3);
        const RowParallelLinear down(context.child("down"), 64, 32, true, 0.3);
        for (int step = 0; step < 3; ++step) {
          const auto before = static_cast<int64_t>(log.of_rank(0).size());
          const at::Tensor all = testing::noise({32, 1, 32}, 20 + step).to(at::kFloat);
          const at::Tensor x =
              sequence ? all.chunk(2, 0)[static_cast<size_t>(state.rank())].contiguous() : all;
          const at::Tensor y = down.forward(at::relu(up.forward(x)));
          if (state.rank() == 0) {
            steps.found.push_back(y.detach());
            steps.sent.push_back(static_cast<int64_t>(log.of_rank(0).size()) - before);
          }
          Fp8Scaling::end_step({scaling}, state.group(GroupKind::tp_dp_cp));
        }
        if (state.rank() != 0) return;
        for (const auto& layer : scaling->state()) steps.found.push_back(layer.scales.clone());
      },
      options);
  return steps;
}

TEST(OverlappedFp8, LayersSendInPartsWhereScalesAreKnown) {
  for (const bool sequence : {false, true})
    for (const Fp8Recipe recipe : {Fp8Recipe::delayed, Fp8Recipe::tensorwise, Fp8Recipe::rowwise}) {
      SCOPED_TRACE(fmt::format("{}, sp {}", to_string(recipe), sequence));
      const Fp8Steps found = fp8_steps(recipe, sequence, true);
      const Fp8Steps plain = fp8_steps(recipe, sequence, false);
      ASSERT_EQ(found.found.size(), plain.found.size());
      // The 8-bit operands are equal, so the products differ only by fp32 rounding.
      for (size_t i = 0; i < plain.found.size(); ++i)
        testing::expect_near(found.found[i], plain.found[i].to(at::kDouble), 1e-6);
      // A gather and a sum, in two parts each. The first delayed scales take calls for four
      // operands.
      const int64_t once = sequence ? 2 : 1, first = recipe == Fp8Recipe::delayed ? 4 : 0;
      EXPECT_EQ(plain.sent, (std::vector<int64_t>{once + first, once, once}));
      const int64_t parts = recipe == Fp8Recipe::tensorwise ? once : 2 * once;
      EXPECT_EQ(found.sent, (std::vector<int64_t>{first > 0 ? once + first : parts, parts, parts}));
    }
}

}  // namespace
}  // namespace lockstep
