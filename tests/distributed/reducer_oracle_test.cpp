// DistributedDataParallel against PyTorch's own c10d::Reducer, with the same buckets.

#include <gtest/gtest.h>

#include <map>

#include <ATen/ATen.h>

#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/tests/support/c10d_reducer.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/small_net.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::RecordedCollective;
using testing::run_ranks;
using testing::SmallNet;

/// The buckets of `ddp` as indices into the parameters' order of registration.
std::vector<std::vector<size_t>> bucket_indices(const DistributedDataParallel& ddp,
                                                const SmallNet& net) {
  std::map<std::string, size_t> index;
  size_t next = 0;
  for (const auto& item : net.named_parameters()) index[item.key()] = next++;
  std::vector<std::vector<size_t>> buckets;
  for (const auto& info : ddp.buckets()) {
    buckets.emplace_back();
    for (const std::string& name : info.parameters) buckets.back().push_back(index.at(name));
  }
  return buckets;
}

/// Gradients and collectives of three steps with accumulation, as the two must agree on them.
struct Trace {
  std::vector<at::Tensor> gradients;
  std::vector<RecordedCollective> collectives;
};

std::vector<RecordedCollective> all_reduces_since(const CollectiveLog& log, int64_t rank,
                                                  size_t start) {
  const auto calls = log.of_rank(rank);
  return {calls.begin() + static_cast<int64_t>(start), calls.end()};
}

at::Tensor batch(const ParallelState& state, int step, int pass) {
  return SmallNet::samples(100 * step + 10 * state.rank() + 5 * pass, 5, at::kFloat);
}

void note_gradients(const SmallNet& net, Trace& trace) {
  for (const at::Tensor& param : net.parameters())
    trace.gradients.push_back(param.grad().detach().clone());
}

Trace run_ours(const ParallelState& state, const CollectiveLog& log, int64_t bucket_size,
               std::vector<std::vector<size_t>>* buckets) {
  SmallNet net(4, at::kFloat);
  DistributedDataParallelConfig config;
  config.bucket_size = bucket_size;
  config.calculate_per_token_loss = false;
  DistributedDataParallel ddp(net, state, config);
  *buckets = bucket_indices(ddp, net);
  Trace trace;
  const size_t start = log.of_rank(state.rank()).size();
  for (int step = 0; step < 3; ++step) {
    ddp.zero_grad_buffer();
    {
      const auto guard = ddp.no_sync();
      net.loss(batch(state, step, 0)).backward();
    }
    net.loss(batch(state, step, 1)).backward();
    ddp.finish_grad_sync();
    note_gradients(net, trace);
  }
  trace.collectives = all_reduces_since(log, state.rank(), start);
  return trace;
}

Trace run_reducer(const ParallelState& state, const CollectiveLog& log,
                  const std::vector<std::vector<size_t>>& buckets) {
  SmallNet net(4, at::kFloat);
  c10d::Reducer reducer =
      testing::make_c10d_reducer(net.parameters(), buckets, state.group(GroupKind::dp_cp));
  Trace trace;
  const size_t start = log.of_rank(state.rank()).size();
  for (int step = 0; step < 3; ++step) {
    for (at::Tensor& param : net.parameters())
      if (param.grad().defined()) param.grad().zero_();
    net.loss(batch(state, step, 0)).backward();  // without prepare_for_backward: accumulates
    reducer.prepare_for_forward();
    const at::Tensor loss = net.loss(batch(state, step, 1));
    reducer.prepare_for_backward({});
    loss.backward();
    note_gradients(net, trace);
  }
  trace.collectives = all_reduces_since(log, state.rank(), start);
  return trace;
}

TEST(ReducerOracle, AveragedGradientsAndCollectivesAreThoseOfC10d) {
  for (const int64_t ranks : {2, 3, 4}) {
    for (const int64_t bucket_size : {1, 30, 1000000}) {
      CollectiveLog log;
      run_ranks(ranks,
                [&](const ParallelState& state) {
                  std::vector<std::vector<size_t>> buckets;
                  const Trace ours = run_ours(state, log, bucket_size, &buckets);
                  const Trace theirs = run_reducer(state, log, buckets);
                  ASSERT_EQ(ours.gradients.size(), theirs.gradients.size());
                  for (size_t i = 0; i < ours.gradients.size(); ++i) {
                    // Both divide by the number of ranks before the sum, so the bits are the same.
                    // But in its first step the Reducer copies the gradients into its buckets, and
                    // there it multiplies by the rounded reciprocal.
                    const bool reciprocal = ranks == 3 && i < ours.gradients.size() / 3;
                    EXPECT_TRUE(reciprocal
                                    ? at::allclose(ours.gradients[i], theirs.gradients[i], 1e-6)
                                    : at::equal(ours.gradients[i], theirs.gradients[i]))
                        << i;
                  }
                  EXPECT_EQ(ours.collectives, theirs.collectives);
                  EXPECT_EQ(ours.collectives.size(), 3 * buckets.size());
                },
                {.log = &log});
    }
  }
}

}  // namespace
}  // namespace lockstep
