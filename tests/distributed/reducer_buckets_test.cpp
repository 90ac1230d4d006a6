// Buckets of the Reducer: assignment, validation, and changes after the first iteration. RN is case
// N of PyTorch's behaviour, in the list for this front:
//
//   R1-R13   bucket assignment                      here
//   R14-R25  construction, layout after training    here
//   R56-R58  parameters that differ                 here
//   R26-R35  gradients, no_sync                     reducer_gradients_test.cpp; R27-R30 in
//                                                   reducer_hooks_test.cpp
//   R36-R44  unused parameters                      reducer_unused_test.cpp
//   R45      static graph set after a step          does not apply: options are set at construction
//   R46-R50  static graph, recomputation            reducer_unused_test.cpp
//   R51-R55  uneven inputs                          reducer_join_test.cpp
//   R59-R61  sparse gradients                       reducer_sparse_test.cpp
//   R62-R72  collectives of c10d                    do not apply: parallel_state's
//   R73-R78  stores of c10d                         do not apply: parallel_state's
//   R79-R81  fully_shard                            do not apply: no front of this kind
//   R82      record of an exception of c10d         does not apply: there is no such record
//   R83      timing                                 reducer_join_test.cpp
//
// Two details do not apply: R40's dependence on TORCH_DISTRIBUTED_DEBUG (names are always there),
// and R22's field gloo_num_threads (host exchange has no such threads).

#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <random>

#include <torch/csrc/distributed/c10d/reducer.hpp>

#include "lockstep/core/error.h"
#include "lockstep/distributed/reducer_assignment.h"
#include "lockstep/tests/distributed/reducer_nets.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::errors_of_ranks;
using testing::named;
using testing::named_zeros;
using testing::replicas;
using testing::run_ranks;
using testing::throws_with;

using Buckets = std::vector<std::vector<size_t>>;
using Limits = std::vector<int64_t>;

at::Tensor floats(int64_t numel) { return at::zeros({numel}); }
at::Tensor doubles(int64_t numel) { return at::zeros({numel}, at::kDouble); }
at::Tensor halves(int64_t numel) { return at::zeros({numel}, at::kHalf); }

void expect_assignment(const std::vector<at::Tensor>& tensors, const Limits& limits,
                       const Buckets& buckets, const Limits& bucket_limits,
                       const std::vector<bool>& sparse = {},
                       const std::vector<size_t>& indices = {}) {
  const auto found = compute_bucket_assignment_by_size(tensors, limits, sparse, indices);
  EXPECT_EQ(found.buckets, buckets);
  EXPECT_EQ(found.limits, bucket_limits);
}

TEST(BucketAssignment, R1EachTensorFillsABucket) {
  expect_assignment({floats(100), floats(200), floats(100), floats(50)}, {400},
                    {{0}, {1}, {2}, {3}}, {400, 400, 400, 400});
}

std::vector<at::Tensor> alternating() {
  return {floats(50), doubles(25), floats(50), doubles(25), floats(50), doubles(25)};
}

TEST(BucketAssignment, R2DtypesAreApart) {
  expect_assignment(alternating(), {400}, {{0, 2}, {1, 3}, {4}, {5}}, {400, 400, 400, 400});
}

TEST(BucketAssignment, R3LaterBucketsHaveLaterLimits) {
  expect_assignment({floats(10), floats(10), floats(10), floats(10)}, {40, 80}, {{0}, {1, 2}, {3}},
                    {40, 80, 80});
}

TEST(BucketAssignment, R4EachDtypeHasItsOwnLimit) {
  expect_assignment(alternating(), {200, 400}, {{0}, {1}, {2, 4}, {3, 5}}, {200, 200, 400, 400});
}

TEST(BucketAssignment, R5R6SparseOnesAreAlone) {
  const std::vector<at::Tensor> tensors = {floats(10), floats(10), floats(10)};
  expect_assignment(tensors, {1000}, {{0, 2}, {1}}, {1000, 0}, {false, true, false});
  expect_assignment(tensors, {40, 1000}, {{0}, {1}, {2}}, {0, 40, 1000}, {true, false, false});
}

TEST(BucketAssignment, R7GivenIndicesKeepTheirOrder) {
  expect_assignment({floats(10), floats(20), floats(30)}, {40}, {{2}, {0}, {1}}, {40, 40, 40}, {},
                    {2, 0, 1});
}

TEST(BucketAssignment, R8R9R11ZeroElementsZeroLimitsNoLimit) {
  expect_assignment({floats(0), floats(1)}, {4}, {{0, 1}}, {4});
  expect_assignment({floats(1), floats(1), floats(1)}, {0}, {{0}, {1}, {2}}, {0, 0, 0});
  constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  expect_assignment({floats(1), floats(1)}, {kNone}, {{0, 1}}, {kNone});
}

TEST(BucketAssignment, R10HalfAndBfloat16AreApart) {
  expect_assignment({halves(3), at::zeros({3}, at::kBFloat16), halves(3)}, {6, 100},
                    {{0}, {1}, {2}}, {6, 6, 100});
}

TEST(BucketAssignment, BytesAreThoseOfTheDtypeThatIsReduced) {
  const std::vector<at::Tensor> tensors(4, halves(1));
  EXPECT_EQ(compute_bucket_assignment_by_size(tensors, {8}, {}, {}, at::kFloat).buckets,
            (Buckets{{0, 1}, {2, 3}}));
  EXPECT_EQ(compute_bucket_assignment_by_size(tensors, {8}).buckets, (Buckets{{0, 1, 2, 3}}));
  const std::vector<NamedParameter> params = named({halves(1), halves(1), halves(1), halves(1)});
  const Reducer reducer(params, replicas(ParallelState::single_process()),
                        {.bucket_bytes_caps = {8}, .reduce_dtype = at::kFloat});
  EXPECT_EQ(reducer.buckets().size(), 2);
}

TEST(BucketAssignment, R12R13SparseTensorsAndEmptyListsAreRefused) {
  const at::Tensor sparse = at::sparse_coo_tensor({4, 2}, at::kFloat);
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        compute_bucket_assignment_by_size({floats(1), sparse}, {400});
      },
      "no support for sparse tensors"));
  EXPECT_TRUE(
      throws_with<UsageError>([&] { compute_bucket_assignment_by_size({}, {400}); }, "0 tensors"));
}

TEST(BucketAssignment, RandomListsAreAssignedAsByC10d) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    std::vector<at::Tensor> tensors;
    std::vector<bool> sparse;
    const size_t count = 1 + random() % 12;
    for (size_t i = 0; i < count; ++i) {
      const auto dtype = std::array{at::kFloat, at::kDouble, at::kBFloat16}[random() % 3];
      tensors.push_back(at::zeros({static_cast<int64_t>(random() % 40)}, dtype));
      sparse.push_back(random() % 6 == 0);
    }
    std::vector<size_t> limits;
    for (size_t i = 0; i < 1 + random() % 3; ++i) limits.push_back(random() % 300);
    const auto ours =
        compute_bucket_assignment_by_size(tensors, {limits.begin(), limits.end()}, sparse);
    const auto [buckets, bucket_limits] =
        c10d::compute_bucket_assignment_by_size(tensors, limits, sparse, {}, {});
    EXPECT_EQ(ours.buckets, buckets);
    EXPECT_EQ(ours.limits, Limits(bucket_limits.begin(), bucket_limits.end()));
  }
}

TEST(BucketAssignment, LeftoversOfSeveralDtypesComeInAFixedOrder) {
  // c10d orders these by a hash table.
  expect_assignment({doubles(1), floats(1), halves(1), doubles(1)}, {1000}, {{3, 0}, {2}, {1}},
                    {1000, 1000, 1000}, {}, {3, 2, 1, 0});
}

Reducer alone(const std::vector<NamedParameter>& params, Buckets buckets) {
  return {
      params, replicas(ParallelState::single_process()), {.bucket_indices = std::move(buckets)}};
}

TEST(Reducer, R14R15R16BucketsHoldOneDtype) {
  EXPECT_NO_THROW(alone(named_zeros({20, 500, 200}), {{0, 1, 2}}));
  const auto mixed = named({doubles(20), floats(500), floats(200)});
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        alone(mixed, {{0, 1, 2}});
      },
      "'p1' is Float on cpu, but bucket 0 holds Double on cpu"));
  EXPECT_NO_THROW(alone(mixed, {{0}, {1, 2}}));
}

TEST(Reducer, R17BucketsHoldEachParameterOnce) {
  const auto params = named_zeros({1, 1, 1});
  const std::pair<Buckets, const char*> refused[] = {
      {{{0, 1, 2}, {}}, "bucket 1 is empty"},
      {{{0, 1}}, "parameter 2 ('p2') is in no bucket"},
      {{{0, 1}, {1, 2}}, "parameter 1 ('p1') is listed twice"},
      {{{0, 1, 2, 3}}, "found 3 in bucket 0, allowed: 0 to 2"}};
  for (const auto& [buckets, message] : refused)
    EXPECT_TRUE(throws_with<UsageError>([&] { alone(params, buckets); }, message));
}

TEST(Reducer, R18NothingToTrainDuplicatesAndHookedParametersAreRefused) {
  auto params = named_zeros({1, 1});
  const ProcessGroup group = replicas(ParallelState::single_process());
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        Reducer(std::vector{params[0], params[1], params[0]}, group);
      },
      "'p0' is listed twice"));
  const Reducer first(params, group);
  EXPECT_TRUE(throws_with<UsageError>([&] { Reducer(params, group); }, "hook already"));
  auto frozen = named_zeros({1});
  frozen[0].tensor.set_requires_grad(false);
  EXPECT_TRUE(throws_with<UsageError>([&] { Reducer(frozen, group); },
                                      "Reducer: none of the 1 parameters requires a gradient"));
}

TEST(Reducer, R19ParametersWithoutElements) {
  run_ranks(2, [](const ParallelState& state) {
    const auto params = named({at::zeros({0, 10}), at::zeros({0})});
    Reducer reducer(params, replicas(state));
    testing::reduce(reducer, [&] { return testing::linear_loss(params, {0, 1}, 1); });
    EXPECT_EQ(params[0].tensor.grad().sizes(), at::IntArrayRef({0, 10}));
  });
}

/// Trains `params`, which are used in their order, for `iterations`.
void train(Reducer& reducer, const std::vector<NamedParameter>& params, int iterations) {
  std::vector<size_t> all(params.size());
  std::iota(all.begin(), all.end(), size_t{0});
  for (int i = 0; i < iterations; ++i)
    testing::reduce(reducer, [&] { return testing::linear_loss(params, all, 1); });
}

constexpr int64_t kOneBucket = int64_t{1} << 60;

TEST(Reducer, R20RebuildingPutsTheFirstReadyFirst) {
  run_ranks(2, [](const ParallelState& state) {
    const auto params = named({at::zeros({2000, 1000}), at::zeros({500, 2000})});
    Reducer reducer(params, replicas(state), {.initial_bucket_bytes_caps = {kOneBucket}});
    EXPECT_EQ(reducer.logging_data().strings.at("bucket_sizes"), "12000000");
    train(reducer, params, 2);
    const auto data = reducer.logging_data();
    EXPECT_EQ(data.strings.at("bucket_sizes"), "12000000");
    EXPECT_EQ(data.strings.at("rebuilt_bucket_sizes"), "4000000, 8000000");
    EXPECT_EQ(data.strings.at("rebuilt_per_bucket_param_indices"), "1, 0");
    EXPECT_EQ(reducer.bucket_indices(), (Buckets{{1}, {0}}));
  });
}

TEST(Reducer, R21R25CapsAndDtypesAreReported) {
  const ProcessGroup group = replicas(ParallelState::single_process());
  const Reducer mixed(named({at::zeros({2000, 1000}, at::kDouble), at::zeros({500, 2000})}), group,
                      {.bucket_bytes_caps = {1572864}});
  const auto data = mixed.logging_data();
  EXPECT_EQ(data.strings.at("bucket_sizes"), "4000000, 16000000");
  EXPECT_EQ(data.strings.at("dtypes"), "double, float");
  EXPECT_EQ(data.integers.at("bucket_cap_bytes"), 1572864);
  const Reducer listed(named({at::zeros({2000, 1000}), at::zeros({500, 2000})}), group,
                       {.bucket_bytes_caps = {1 << 20, 2 << 20}});
  EXPECT_EQ(listed.logging_data().strings.at("bucket_sizes"), "4000000, 8000000");
}

TEST(Reducer, R22LoggingDataOfASmallNet) {
  run_ranks(2, [](const ParallelState& state) {
    auto params =
        named({at::zeros({10, 2}), at::zeros({50, 10}), at::zeros({50}), at::zeros({4, 50})});
    params[2].tensor.set_requires_grad(false);
    Reducer reducer(params, replicas(state));
    params.erase(params.begin() + 2);
    train(reducer, params, 18);
    const auto data = reducer.logging_data();
    const std::map<std::string, std::string> strings = {
        {"backend_name", "gloo"},
        {"bucket_sizes", "2880"},
        {"rebuilt_bucket_sizes", "2880"},
        {"prev_iteration_grad_ready_order_indices", "2, 1, 0"},
        {"rebuilt_per_bucket_param_indices", "2 1 0"},
        {"dtypes", "float"}};
    for (const auto& [name, value] : strings) EXPECT_EQ(data.strings.at(name), value) << name;
    const std::map<std::string, int64_t> integers = {{"world_size", 2},
                                                     {"rank", state.rank()},
                                                     {"iteration", 18},
                                                     {"bucket_cap_bytes", 26214400},
                                                     {"num_parameter_tensors", 3},
                                                     {"total_parameter_size_bytes", 2880},
                                                     {"num_buckets_reduced", 1},
                                                     {"has_rebuilt_buckets", 1},
                                                     {"find_unused_parameters", 0},
                                                     {"gradient_as_bucket_view", 1},
                                                     {"has_error", 0}};
    for (const auto& [name, value] : integers) EXPECT_EQ(data.integers.at(name), value) << name;
    EXPECT_EQ(data.buckets.at(0).bytes, 2880);
    EXPECT_NE(data.to_string().find("bucket_sizes: 2880"), std::string::npos);
  });
}

TEST(Reducer, R23R24RebuiltBucketsFollowTheirCaps) {
  run_ranks(2, [](const ParallelState& state) {
    for (const bool as_view : {true, false}) {
      const auto params = named_zeros({64, 64, 32});
      Reducer small(params, replicas(state),
                    {.bucket_bytes_caps = {256, 512}, .gradient_as_bucket_view = as_view});
      train(small, params, 2);
      EXPECT_EQ(small.bucket_indices(), (Buckets{{2, 1}, {0}}));
    }
    const auto params = named_zeros({64, 64, 32});
    Reducer listed(params, replicas(state), {.bucket_bytes_caps = {100, 300}});
    EXPECT_EQ(listed.bucket_indices(), (Buckets{{1, 2}, {0}}));
    train(listed, params, 2);
    EXPECT_EQ(listed.bucket_indices(), (Buckets{{2}, {1, 0}}));
    for (const auto& param : params) EXPECT_TRUE(testing::all_equal_to(param.tensor.grad(), 2));
  });
}

TEST(Reducer, AllRanksRebuildInTheOrderOfTheFirst) {
  run_ranks(3, [](const ParallelState& state) {
    const auto params = named_zeros({4, 4, 4});
    Reducer reducer(params, replicas(state), {.bucket_bytes_caps = {1}});
    // The loss's last parameter gets its gradient first; ranks differ.
    const std::vector<size_t> used =
        state.rank() == 0 ? std::vector<size_t>{1, 0, 2} : std::vector<size_t>{2, 1, 0};
    for (int i = 0; i < 2; ++i)
      testing::reduce(reducer, [&] { return testing::linear_loss(params, used, state.rank()); });
    EXPECT_EQ(reducer.bucket_indices(), (Buckets{{2}, {0}, {1}}));
    for (const auto& param : params) EXPECT_TRUE(testing::all_equal_to(param.tensor.grad(), 2));
  });
}

TEST(Reducer, R56R57R58EveryRankThrowsWhereParametersOrOptionsDiffer) {
  using Tensors = std::vector<at::Tensor>;
  const auto errors = [](const Tensors& first, const Tensors& second, int64_t second_cap = 100) {
    return errors_of_ranks(2, [&](const ParallelState& state) {
      const bool is_first = state.rank() == 0;
      Reducer(named(is_first ? first : second), replicas(state),
              {.bucket_bytes_caps = {is_first ? 100 : second_cap}});
    });
  };
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {errors({at::zeros({500, 8})}, {at::zeros({50, 8})}), "'p0' is [500, 8] Float"},
      {errors({floats(2)}, {floats(2), floats(3)}), "rank 0 has 1 parameters and rank 1 has 2"},
      {errors({at::zeros({2, 3}), floats(4)}, {at::zeros({2, 3}), floats(5)}), "'p1' is [4] Float"},
      {errors({floats(2)}, {floats(2)}, 200),
       "different settings: bucket_bytes_caps is [100] on rank 0 and [200] on rank 1"}};
  for (const auto& [messages, part] : cases)
    for (const std::string& message : messages)
      EXPECT_NE(message.find(part), std::string::npos) << message;
}

TEST(Reducer, ConstructionGivesAllRanksTheParametersOfTheFirst) {
  run_ranks(3, [](const ParallelState& state) {
    const auto params = named({at::full({3, 2}, static_cast<double>(state.rank())).t()});
    const Reducer reducer(params, replicas(state));
    EXPECT_TRUE(testing::all_equal_to(params[0].tensor.detach(), 0));
  });
}

}  // namespace
}  // namespace lockstep
