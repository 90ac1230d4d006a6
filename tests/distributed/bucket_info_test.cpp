#include <gtest/gtest.h>

#include <map>

#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/tests/distributed/reducer_nets.h"
#include "lockstep/tests/support/described_params.h"

namespace lockstep {
namespace {

using testing::DescribedParams;
using testing::named;
using testing::named_zeros;
using testing::replicas;
using testing::run_ranks;
using Kind = GradOperation::Kind;

TEST(BucketInfo, OfDistributedDataParallelIsDataWithTheSameText) {
  run_ranks(4,
            [](const ParallelState& state) {
              for (const bool sharded : {false, true}) {
                DescribedParams net;
                net.add("weight", {6}).add("bias", {2});
                DistributedDataParallelConfig config;
                config.use_distributed_optimizer = sharded;
                const DistributedDataParallel ddp(net, state, config);
                const std::vector<BucketInfo> buckets = ddp.buckets();
                ASSERT_EQ(buckets.size(), 1u);
                const BucketInfo& bucket = buckets[0];
                EXPECT_EQ(bucket.operation,
                          (GradOperation{sharded ? Kind::reduce_scatter : Kind::all_reduce,
                                         ReduceOp::sum}));
                const GroupKind group = sharded ? GroupKind::intra_dp_cp : GroupKind::dp_cp;
                EXPECT_EQ(bucket.group.to_string(), state.group(group).to_string());
                EXPECT_EQ(bucket.num_parameters, 2);
                EXPECT_EQ(bucket.parameters, (std::vector<std::string>{"bias", "weight"}));
                EXPECT_EQ(bucket.instances.has_value(), sharded);
                const int64_t numel = sharded ? 128 : 8, ranks = sharded ? 2 : 4;
                EXPECT_EQ(bucket.numel, numel);
                EXPECT_EQ(bucket.instance_bytes, sharded ? numel * 8 / ranks : 0);
                if (state.rank() != 0) continue;
                if (sharded) {
                  EXPECT_EQ(bucket.instances->to_string(), "inter-optimizer [0, 2]");
                }
                EXPECT_EQ(to_string(buckets),
                          sharded ? "bucket 0 ('weight' to 'bias'): reduce-scatter sum over "
                                    "intra-dp-cp [0, 1], 128 elements of Double, 1024 bytes, 2 "
                                    "parameters\n"
                                  : "bucket 0 ('weight' to 'bias'): all-reduce sum over dp-cp [0, "
                                    "1, 2, 3], 8 elements of Double, 64 bytes, 2 parameters\n");
              }
            },
            {.sizes = {.optimizer_instances = 2}});
}

TEST(BucketInfo, OfAReducerIsDataWithTheSameText) {
  run_ranks(2, [](const ParallelState& state) {
    const auto params = named({at::zeros({4, 2}), at::zeros({3})});
    Reducer reducer(params, replicas(state), {.sparse_parameters = {"p0"}});
    const std::vector<BucketInfo> buckets = reducer.buckets();
    ASSERT_EQ(buckets.size(), 2u);
    std::map<std::string, GradOperation> operations;
    for (const BucketInfo& bucket : buckets) {
      ASSERT_EQ(bucket.parameters.size(), 1u);
      operations[bucket.parameters[0]] = bucket.operation;
      EXPECT_EQ(bucket.group.ranks(), (RankList{0, 1}));
      EXPECT_EQ(bucket.bytes, bucket.numel * 4);
      EXPECT_EQ(bucket.hook, "");
    }
    EXPECT_EQ(operations, (std::map<std::string, GradOperation>{
                              {"p0", {Kind::sparse_all_reduce, ReduceOp::sum}},
                              {"p1", {Kind::all_reduce, ReduceOp::sum}}}));
    EXPECT_EQ(to_string(buckets),
              "bucket 0 ('p1' to 'p1'): all-reduce sum over dp-cp [0, 1], 3 elements of Float, 12 "
              "bytes, 1 parameters\n"
              "bucket 1 ('p0' to 'p0'): sparse all-reduce sum over dp-cp [0, 1], 8 elements of "
              "Float, 32 bytes, 1 parameters\n");

    Reducer hooked(named_zeros({3}), replicas(state));
    hooked.register_comm_hook(std::make_shared<FunctionHook>(
        "twice", [](const GradBucket& bucket) { return [sum = bucket.buffer] { return sum; }; }));
    EXPECT_EQ(hooked.buckets()[0].operation.kind, Kind::hook);
    EXPECT_EQ(hooked.buckets()[0].hook, "twice");
    EXPECT_EQ(to_string(hooked.buckets()),
              "bucket 0 ('p0' to 'p0'): twice over dp-cp [0, 1], 3 elements of Float, 12 bytes, 1 "
              "parameters\n");
  });
}

}  // namespace
}  // namespace lockstep
