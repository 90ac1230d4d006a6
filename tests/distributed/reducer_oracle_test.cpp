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

using testing::BackendCall;
using testing::BackendLog;
using testing::CollectiveLog;
using testing::run_ranks;
using testing::SmallNet;

/// The buckets of `ddp` as indices in the registration order of the parameters.
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

/// Gradients and all-reduces (bytes) of three steps with accumulation. Both must agree on them.
struct Trace {
  std::vector<at::Tensor> gradients;
  std::vector<int64_t> all_reduces;
};

/// For ours: the collective calls. For c10d::Reducer: what reached c10d's backend.
template <class Log>
std::vector<int64_t> all_reduces_since(const Log& log, int64_t rank, size_t start) {
  std::vector<int64_t> bytes;
  const auto calls = log.of_rank(rank);
  for (size_t i = start; i < calls.size(); ++i) {
    EXPECT_TRUE(calls[i].operation == "all_reduce (sum)" || calls[i].operation == "allreduce");
    bytes.push_back(calls[i].bytes);
  }
  return bytes;
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
  trace.all_reduces = all_reduces_since(log, state.rank(), start);
  return trace;
}

Trace run_reducer(const ParallelState& state, const BackendLog& log,
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
  trace.all_reduces = all_reduces_since(log, state.rank(), start);
  return trace;
}

TEST(ReducerOracle, AveragedGradientsAndCollectivesAreThoseOfC10d) {
  for (const int64_t ranks : {2, 3, 4}) {
    for (const int64_t bucket_size : {1, 30, 1000000}) {
      CollectiveLog log;
      BackendLog backend_log;
      run_ranks(ranks,
                [&](const ParallelState& state) {
                  std::vector<std::vector<size_t>> buckets;
                  const Trace ours = run_ours(state, log, bucket_size, &buckets);
                  const Trace theirs = run_reducer(state, backend_log, buckets);
                  ASSERT_EQ(ours.gradients.size(), theirs.gradients.size());
                  for (size_t i = 0; i < ours.gradients.size(); ++i) {
                    // Both divide by the number of ranks before the sum. With two ranks the bits
                    // match; with more ranks, the sum has another order.
                    EXPECT_TRUE(ranks == 2
                                    ? at::equal(ours.gradients[i], theirs.gradients[i])
                                    : at::allclose(ours.gradients[i], theirs.gradients[i], 1e-6))
                        << i;
                  }
                  EXPECT_EQ(ours.all_reduces, theirs.all_reduces);
                  EXPECT_EQ(ours.all_reduces.size(), 3 * buckets.size());
                },
                {.log = &log, .backend_log = &backend_log});
    }
  }
}

}  // namespace
}  // namespace lockstep
