// Ranks that reduce together share other groups with other ranks, whose buffers are cut
// differently. The names of buckets and the order of launches must not depend on that.

#include "lockstep/tests/support/launch_order.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/distributed/reducer.h"
#include "lockstep/tests/support/mesh_params.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

using testing::backward_of;
using testing::CollectiveLog;
using testing::errors_of_ranks;
using testing::expect_one_order;
using testing::grad_is;
using testing::ones_on;
using testing::run_ranks;

struct MeshCase {
  const char* name;
  std::vector<std::pair<std::string, int64_t>> cut;  ///< rows; 0: a norm of 3 elements
};

/// Cut over the second axis, of two or three ranks.
const std::vector<MeshCase> kMeshCases = {
    {"report", {{"norm0", 0}, {"cut0", 3}, {"cut1", 2}, {"norm1", 0}}},
    {"empty part", {{"norm0", 0}, {"cut0", 1}, {"cut1", 2}, {"norm1", 0}}},
    {"only an empty part", {{"cut0", 1}, {"norm0", 0}, {"norm1", 0}}},
    {"many",
     {{"norm0", 0},
      {"cut0", 5},
      {"cut1", 7},
      {"norm1", 0},
      {"cut2", 1},
      {"cut3", 4},
      {"norm2", 0}}},
};

void expect_synchronized(const MeshCase& test, int64_t ranks, int64_t bucket_bytes) {
  const std::string what = std::string(test.name) + ", " + std::to_string(ranks) + " ranks, " +
                           std::to_string(bucket_bytes) + " bytes";
  CollectiveLog log;
  run_ranks(2 * ranks,
            [&](const ParallelState& state) {
              const DeviceMesh mesh(state, {2, ranks}, {"dp", "tp"});
              std::vector<MeshParameter> params;
              for (const auto& [name, rows] : test.cut)
                params.push_back(rows == 0 ? ones_on(mesh, {3}, {Replicate{}, Replicate{}}, name)
                                           : ones_on(mesh, {rows}, {Replicate{}, Shard{0}}, name));
              GradientSynchronizer sync({MeshParameters(params)},
                                        static_cast<double>(bucket_bytes) / (1 << 20), 1);
              sync.bind();
              for (int step = 0; step < 2; ++step) {
                backward_of(MeshParameters(params), 1 << state.rank());
                sync.wait();
                for (size_t i = 0; i < params.size(); ++i) {
                  const int64_t all = (1 << (2 * ranks)) - 1;
                  const int64_t column = mesh.get_local_rank("tp");
                  const double expected = static_cast<double>(
                      test.cut[i].second == 0 ? all : (1 << column) + (1 << (column + ranks)));
                  EXPECT_TRUE(grad_is(params[i], expected))
                      << what << ": " << params[i].name << " on rank " << state.rank() << ": "
                      << params[i].tensor.grad();
                }
                sync.zero_grad();
              }
            },
            {.timeout = std::chrono::seconds(5), .log = &log});
  expect_one_order(log, 2 * ranks, what);
}

TEST(LaunchOrder, SynchronizersOfUnevenPartsAgreeOnTheirBuckets) {
  for (const MeshCase& test : kMeshCases)
    for (const int64_t ranks : {2, 3})
      for (const int64_t bytes : {4, 8, 16, 24, 1 << 20}) {
        try {
          expect_synchronized(test, ranks, bytes);
        } catch (const std::exception& error) {
          ADD_FAILURE() << test.name << ", " << ranks << " ranks, " << bytes
                        << " bytes: " << error.what();
        }
      }
}

NamedParameter named(const std::string& name, const at::Tensor& tensor,
                     const ParamDescription& description) {
  return {name, tensor.clone().requires_grad_(true), description};
}

const ParamDescription kContradiction{
    .gradient_states = {{MeshAxis::tp, GradientState::partial_sum}}, .is_expert = true};

TEST(Descriptions, ContradictionsInAListAreRefusedOnEveryRank) {
  const std::pair<std::string, ParamDescription> cases[] = {
      {"parameter 'w': found a description over tp, allowed: etp, ep, edp, pp (an expert)",
       kContradiction},
      {"parameter 'w': found Partial(sum) over tp, allowed: Replicate, Shard",
       {.placements = {{MeshAxis::tp, Partial{}}}}},
      {"parameter 'w': found a description over tp, allowed: etp, ep, edp, pp (an expert)",
       {.placements = {{MeshAxis::tp, Shard{0}}}, .is_expert = true}},
      {"parameter 'w': found a tie without a name", {.tie = Tie{}}},
      {"parameter 'w': found shape [4]; ParamUpdate::matrix needs two dimensions or more",
       {.update = ParamUpdate::matrix}},
  };
  for (const auto& [expected, description] : cases)
    for (const bool trained : {true, false}) {
      const auto errors =
          errors_of_ranks(4,
                          [&, &wrong = description](const ParallelState& state) {
                            std::vector<NamedParameter> params = {named("v", at::ones({3}), {}),
                                                                  named("w", at::ones({4}), wrong)};
                            params[1].tensor.set_requires_grad(trained);
                            DistributedDataParallel ddp(params, state);
                          },
                          {.sizes = {.tensor = 2}});
      for (const std::string& error : errors)  // its own, or one that it was told of
        EXPECT_NE(error.find(expected), std::string::npos) << error;
    }
}

TEST(Descriptions, ContradictionsAreRefusedByTheReducerToo) {
  const auto errors = errors_of_ranks(2, [](const ParallelState& state) {
    const Reducer reducer({named("w", at::ones({4}), kContradiction)},
                          state.group(GroupKind::dp_cp));
  });
  for (const std::string& error : errors)
    EXPECT_EQ(error,
              "parameter 'w': found a description over tp, allowed: etp, ep, edp, pp (an expert)");
}

TEST(Descriptions, PiecesOfOtherAxesThanTheCuttingOnesAreRefusedOnEveryRank) {
  using enum MeshAxis;
  const auto errors_with = [](const ParamDescription& description) {
    return errors_of_ranks(
        4,
        [&](const ParallelState& state) {
          DistributedDataParallel ddp(
              std::vector<NamedParameter>{named("w", at::ones({4}), description)}, state);
        },
        {.sizes = {.context = 2}});
  };
  const auto refusal = [](const char* axis) {
    return std::string("parameter 'w': found Shard(0) over ") + axis +
           ", allowed: Replicate; only tp, etp and ep cut parameters";
  };
  for (const std::string& error : errors_with({.placements = {{dp, Shard{0}}}}))
    EXPECT_EQ(error, refusal("dp"));
  for (const std::string& error : errors_with({.placements = {{cp, Shard{0}}}}))
    EXPECT_EQ(error, refusal("cp"));
  for (const std::string& error : errors_with({.placements = {{pp, Shard{0}}}}))
    EXPECT_EQ(error, refusal("pp"));
  for (const std::string& error : errors_with({.placements = {{edp, Shard{0}}}, .is_expert = true}))
    EXPECT_EQ(error, refusal("edp"));
}

}  // namespace
}  // namespace lockstep
