// Every order in which gradients can become ready, with different orders on the ranks.

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include <ATen/ATen.h>

#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

constexpr int64_t kParams = 6, kBuckets = 3;

/// The number of reductions that must have started: the longest prefix of complete buckets. The
/// buckets hold the parameters 5 4 | 3 2 | 1 0.
int64_t complete_prefix(const std::vector<bool>& arrived) {
  int64_t prefix = 0;
  while (prefix < kBuckets && arrived[static_cast<size_t>(5 - 2 * prefix)] &&
         arrived[static_cast<size_t>(4 - 2 * prefix)])
    ++prefix;
  return prefix;
}

TEST(ReadinessOrders, EveryOrderOfSixParametersReducesThreeBucketsAsEarlyAsAllowed) {
  std::vector<int64_t> started(2);  // on each rank, since the step began
  testing::RankThreadOptions options;
  options.observer = [&](const CollectiveRecord& call) {
    if (call.operation == "all_reduce (sum)") ++started[static_cast<size_t>(call.rank)];
  };
  testing::run_ranks(
      2,
      [&](const ParallelState& state) {
        const int64_t rank = state.rank();
        std::vector<NamedParameter> params;
        std::vector<at::Tensor> sums;
        for (int64_t i = 0; i < kParams; ++i) {
          params.push_back({"p" + std::to_string(i), at::zeros({4}).requires_grad_(true), {}});
          sums.insert(sums.begin(), at::full({4}, static_cast<double>(3 * i + 10), at::kFloat));
        }
        DistributedDataParallelConfig config;
        config.bucket_size = 8;
        DistributedDataParallel ddp(params, state, config);
        const at::Tensor expected = at::cat(sums), grads = ddp.buffers().at(0)->grad_data();
        std::vector<size_t> order(kParams);
        std::iota(order.begin(), order.end(), size_t{0});
        int64_t wrong = 0, orders = 0;
        do {
          ddp.zero_grad_buffer();
          int64_t& begun = started[static_cast<size_t>(rank)] = 0;
          std::vector<bool> arrived(kParams);
          for (size_t i = 0; i < order.size(); ++i) {
            const size_t param = rank == 0 ? order[i] : order[order.size() - 1 - i];
            // 1 * i + 0 on the first rank, 2 * i + 10 on the other
            const auto number = static_cast<int64_t>(param) * (rank + 1) + 10 * rank;
            (params[param].tensor.sum() * number).backward();
            arrived[param] = true;
            wrong += begun != complete_prefix(arrived);
          }
          ddp.finish_grad_sync();
          wrong += begun != kBuckets || !at::equal(grads, expected);
          ++orders;
        } while (std::next_permutation(order.begin(), order.end()));
        EXPECT_EQ(wrong, 0);
        EXPECT_EQ(orders, 720);
      },
      options);
}

}  // namespace
}  // namespace lockstep
