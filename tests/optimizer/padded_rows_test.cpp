// Zeros in the gradient of a parameter with rows of padding, which ranks cut as torch.chunk does.

#include <gtest/gtest.h>

#include <memory>

#include <ATen/ATen.h>

#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/clip_grads.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::DescribedParams;
using testing::run_ranks;

constexpr int64_t kRowsBeforePadding = 9, kZerosBeforePadding = 2;

/// 11 rows: of two ranks the last one holds 5, of three ranks 3.
at::Tensor padded_gradient() {
  at::Tensor grad = at::ones({11, 2}, at::kDouble);
  grad[2][1] = 0;
  grad[8][0] = 0;
  grad.slice(0, kRowsBeforePadding).zero_();
  return grad;
}

/// A rank's piece of the table, with its gradient.
struct PaddedTable {
  PaddedTable(const ParallelState& state, bool sharded) {
    const ProcessGroup tp = state.group(GroupKind::tp);
    grad = padded_gradient().chunk(tp.size())[static_cast<size_t>(tp.rank())].contiguous();
    net.add("table", grad.sizes().vec(),
            {.placements = {{MeshAxis::tp, Shard{0}}}, .unpadded_rows = kRowsBeforePadding});
    DistributedDataParallelConfig config;
    config.use_distributed_optimizer = sharded;
    ddp = std::make_unique<DistributedDataParallel>(net, state, config);
  }

  void backward() {
    ddp->zero_grad_buffer();
    net.backward([&](auto&, auto&) { return grad; });
    finalize_model_grads({ddp.get()}, testing::no_tokens());
  }

  at::Tensor grad;
  DescribedParams net;
  std::unique_ptr<DistributedDataParallel> ddp;
};

TEST(PaddedRows, DoNotCountWherePiecesDifferInLength) {
  for (const int64_t pieces : {1, 2, 3})
    for (const bool sharded : {false, true})
      run_ranks(2 * pieces,
                [&](const ParallelState& state) {
                  PaddedTable table(state, sharded);
                  table.backward();
                  EXPECT_EQ(count_zeros({table.ddp.get()}).item<int64_t>(), kZerosBeforePadding)
                      << pieces << " pieces";
                },
                {.sizes = {.tensor = pieces}});
}

TEST(PaddedRows, AreLookedUpOnceByAnOptimizerThatCountsInEachStep) {
  for (const int64_t pieces : {1, 2, 3}) {
    CollectiveLog log;
    run_ranks(pieces,
              [&](const ParallelState& state) {
                PaddedTable table(state, /*sharded=*/false);
                OptimizerConfig config;
                config.log_num_zeros_in_grad = true;
                const auto optimizer = make_optimizer({table.ddp.get()}, config);
                for (int step = 0; step < 3; ++step) {
                  table.backward();
                  EXPECT_EQ(optimizer->step().num_zeros, kZerosBeforePadding);
                }
              },
              {.sizes = {.tensor = pieces}, .log = &log});
    int messages = 0;  // lengths of texts, then the texts
    for (const CollectiveRecord& call : log.of_rank(0))
      messages += call.label == "pieces of parameters" ? 1 : 0;
    EXPECT_EQ(messages, pieces == 1 ? 0 : 2);
  }
}

}  // namespace
}  // namespace lockstep
