// What the fronts refuse during set-up, on every rank.

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/all_reduce_grads.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/distributed/power_sgd_hook.h"
#include "lockstep/tests/distributed/reducer_nets.h"
#include "lockstep/tests/support/mesh_params.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::backward_of;
using testing::errors_of_ranks;
using testing::linear_loss;
using testing::named_zeros;
using testing::ones_on;
using testing::replicas;
using testing::run_ranks;
using testing::throws_with;
using Errors = std::vector<std::string>;

void expect_all_contain(const Errors& errors, const std::string& part) {
  for (size_t rank = 0; rank < errors.size(); ++rank)
    EXPECT_NE(errors[rank].find(part), std::string::npos)
        << "rank " << rank << ": '" << errors[rank] << "', expected '" << part << "'";
}

NamedParameter leaf(const std::string& name) {
  const at::Tensor tensor = at::ones({2}).requires_grad_(true);
  return {name, tensor, default_description(tensor)};
}

/// Sets up a front with `list`.
using SetUp =
    std::function<void(const std::vector<NamedParameter>& list, const ParallelState& state)>;

const std::vector<std::pair<std::string, SetUp>> kFronts = {
    {"DistributedDataParallel",
     [](const auto& list, const ParallelState& state) { DistributedDataParallel(list, state); }},
    {"Reducer",
     [](const auto& list, const ParallelState& state) { Reducer(list, replicas(state)); }}};

TEST(FrontChecks, AnUndefinedTensorInAListIsNamed) {
  const ParallelState alone = ParallelState::single_process();
  for (const auto& [front, set_up] : kFronts)
    EXPECT_TRUE(throws_with<UsageError>(
        [&, &construct = set_up] {
          construct({leaf("first"), {"nil", at::Tensor(), {}}}, alone);
        },
        front + ": parameter 1 ('nil') is an undefined tensor, allowed: defined ones"));
  const std::string unnamed = "parameter 1 ('nil'): the tensor is undefined";
  const MeshParameter nil(at::Tensor(), "nil");
  const auto take = [&] { return MeshParameters({leaf("first").tensor, nil}); };
  EXPECT_TRUE(throws_with<UsageError>([&] { GradientSynchronizer({take()}, 1, 1); }, unnamed));
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        all_reduce_grads(take(), DeviceMesh(alone, {1, 1}, {"dp", "cp"}), false);
      },
      unnamed));
}

TEST(FrontChecks, TwoParametersOfOneNameAreRefused) {
  const ParallelState alone = ParallelState::single_process();
  for (const auto& [front, set_up] : kFronts)
    EXPECT_TRUE(throws_with<UsageError>(
        [&, &construct = set_up] {
          construct({leaf("w"), leaf("b"), leaf("w")}, alone);
        },
        front + ": parameters 0 and 2 are both called 'w'; names must be unique"));
  const DeviceMesh mesh(alone, {1}, {"dp"});
  const auto param = [&](const char* name) { return ones_on(mesh, {2}, {Replicate{}}, name); };
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        GradientSynchronizer({{param("b")}, {param("w"), param("w")}}, 1, 1);
      },
      "parameter group 1: two parameters are called 'w'; names must be unique"));
  GradientSynchronizer({{param(""), param("")}, {param("")}}, 1, 1).bind();  // without names
}

/// Lists that a front refuses without comparing ranks, and the errors.
std::vector<std::pair<std::vector<NamedParameter>, std::string>> bad_lists() {
  const NamedParameter weight = leaf("weight");
  return {{{{"weight", at::Tensor(), {}}}, "parameter 0 ('weight') is an undefined tensor"},
          {{weight, weight}, "parameter 'weight' is listed twice"},
          {{weight, leaf("weight")}, "parameters 0 and 1 are both called 'weight'"}};
}

TEST(FrontChecks, AListThatOneRankRefusesEndsTheOthersToo) {
  for (const auto& [front, set_up] : kFronts)
    for (size_t bad = 0; bad < bad_lists().size(); ++bad) {
      const auto errors = errors_of_ranks(3, [&, &construct = set_up](const ParallelState& state) {
        construct(state.rank() == 1 ? bad_lists()[bad].first : std::vector{leaf("weight")}, state);
      });
      expect_all_contain(errors, front + ": " + bad_lists()[bad].second);
      for (const size_t rank : {0, 2})
        EXPECT_TRUE(
            errors[rank].starts_with("rank 1 of group dp-cp [0, 1, 2] rejected its "
                                     "arguments: " +
                                     front))
            << errors[rank];
    }
}

TEST(FrontChecks, AListThatAllRanksRefuseLeavesTheirGroupUsable) {
  for (const auto& [front, set_up] : kFronts)
    run_ranks(2, [&, &construct = set_up](const ParallelState& state) {
      for (const auto& [list, message] : bad_lists())
        EXPECT_TRUE(
            throws_with<UsageError>([&, &taken = list] { construct(taken, state); }, message));
      EXPECT_NO_THROW(construct({leaf("weight")}, state));
    });
}

TEST(FrontChecks, SparseRowsThatDifferAreNoWrongSum) {
  const auto errors = errors_of_ranks(
      2,
      [](const ParallelState& state) {
        const auto params = testing::named({at::ones({6, 2})});
        Reducer reducer(params, replicas(state), {.sparse_parameters = {"p0"}});
        reducer.set_sparse_metadata({{"p0", at::tensor({state.rank(), int64_t{3}}, at::kLong)}});
        testing::reduce(reducer, [&] {
          return at::embedding(params[0].tensor, at::tensor({3}, at::kLong), -1, false, true).sum();
        });
      },
      {.timeout = std::chrono::seconds(5)});  // nothing else ends a sum of which a rank is absent
  expect_all_contain(errors, "bucket 0 ('p0' to 'p0'), 2 rows with digest ");
}

TEST(FrontChecks, OptionsThatOneRankRefusesEndTheOthersToo) {
  const auto of_reducer = errors_of_ranks(2, [](const ParallelState& state) {
    Reducer({leaf("weight")}, replicas(state), {.bucket_bytes_caps = {1 - state.rank()}});
  });
  expect_all_contain(of_reducer, "Reducer: bucket_bytes_caps: found [0]");
  const auto of_ddp = errors_of_ranks(2, [](const ParallelState& state) {
    DistributedDataParallelConfig config;
    config.overlap_param_gather = state.rank() == 1;
    DistributedDataParallel(std::vector{leaf("weight")}, state, config);
  });
  expect_all_contain(of_ddp, "ddp.overlap_param_gather");
  for (const std::string& error : {of_reducer[0], of_ddp[0]})
    EXPECT_TRUE(error.starts_with("rank 1 of group dp-cp [0, 1] rejected its arguments: "))
        << error;
}

TEST(FrontChecks, BucketIndicesAreComparedOneByOne) {
  const auto errors = errors_of_ranks(2, [](const ParallelState& state) {
    using Indices = std::vector<std::vector<size_t>>;
    Reducer({leaf("a"), leaf("b"), leaf("c")}, replicas(state),
            {.bucket_indices = state.rank() == 0 ? Indices{{2, 1}, {0}} : Indices{{2}, {1, 0}}});
  });
  expect_all_contain(errors,
                     "have different settings: bucket_indices is [[2, 1], [0]] on rank 0 "
                     "and [[2], [1, 0]] on rank 1");
}

/// The error of each rank of `shape` from bind(). The last rank has other arguments.
Errors errors_of_bind(const std::vector<int64_t>& shape, double megabytes, int64_t accumulations,
                      const GradientSynchronizerOptions& options, bool wide = false) {
  const int64_t ranks = shape[0] * shape[1];
  return errors_of_ranks(ranks, [&](const ParallelState& state) {
    const DeviceMesh mesh(state, shape, {"dp", "tp"});
    MeshParameter sharded = ones_on(mesh, {4}, {Replicate{}, Shard{0}}, "sharded", at::kBFloat16);
    const MeshParameter norm = ones_on(mesh, {4}, {Replicate{}, Replicate{}}, "norm");
    const bool other = state.rank() == ranks - 1;
    if (other && wide) sharded.tensor.set_grad_dtype(at::kFloat);
    GradientSynchronizer sync({{norm, sharded}}, other ? megabytes : 1, other ? accumulations : 1,
                              other ? options : GradientSynchronizerOptions());
    sync.bind();
  });
}

TEST(FrontChecks, GradientSynchronizersWithOtherOptionsAllThrow) {
  const GradientSynchronizerOptions plain, mean = {.reduction = GradientReduction::mean},
                                           unused = {.allow_unused_parameters = true};
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{2, 1}, {3, 1}, {2, 2}}) {
    const auto last = std::to_string(shape[0] * shape[1] - 1);
    expect_all_contain(errors_of_bind(shape, 1, 1, mean), "have different settings: reduction is ");
    expect_all_contain(errors_of_bind(shape, 1, 1, mean), "mean on rank " + last);
    expect_all_contain(errors_of_bind(shape, 2.5, 1, plain), "bucket_size_mb is 1 on rank ");
    expect_all_contain(errors_of_bind(shape, 1, 2, plain), "require_accumulations is 1 on rank ");
    expect_all_contain(errors_of_bind(shape, 1, 1, unused),
                       "allow_unused_parameters is false on rank ");
    EXPECT_EQ(errors_of_bind(shape, 1, 1, plain), Errors(shape[0] * shape[1]));
  }
}

TEST(FrontChecks, GradientSynchronizersWithOtherDtypesOfGradientsAllThrow) {
  const Errors errors = errors_of_bind({2, 2}, 1, 1, {}, /*wide=*/true);
  for (const size_t rank : {1, 3})  // ranks that share 'sharded'
    EXPECT_NE(errors[rank].find("dtype of gradients is BFloat16 on rank 1 and Float on rank 3"),
              std::string::npos)
        << errors[rank];
  // Where the dtype changes the buffers, the lists differ.
  expect_all_contain(errors_of_bind({2, 1}, 1, 1, {}, /*wide=*/true),
                     "'sharded' is on rank 1 only");
}

/// Two iterations with the hook `names[rank]`, "" for none. It is registered before the first
/// iteration, or after it if `late`.
Errors errors_of_hooks(const Errors& names, bool late, bool inside_join = false) {
  return errors_of_ranks(static_cast<int64_t>(names.size()), [&](const ParallelState& state) {
    const auto params = named_zeros({4});
    Reducer reducer(params, replicas(state));
    const auto add_hook = [&] {
      const std::string& name = names[static_cast<size_t>(state.rank())];
      const auto plain = std::make_shared<AllReduceHook>();
      if (!name.empty())
        reducer.register_comm_hook(std::make_shared<FunctionHook>(
            name, [plain](const GradBucket& bucket) { return plain->start(bucket); }));
    };
    const auto iterate = [&] {
      testing::reduce(reducer, [&] { return linear_loss(params, {0}, 1); });
    };
    if (late) iterate();
    add_hook();
    if (!inside_join) return iterate();
    reducer.join([&] {
      if (state.rank() == 0) iterate();
    });
  });
}

TEST(FrontChecks, ReducersWithOtherHooksAllThrow) {
  expect_all_contain(errors_of_hooks({"mine", "yours"}, false),
                     "the ranks of group dp-cp [0, 1] have different communication hooks: mine on "
                     "rank 0 and yours on rank 1");
  expect_all_contain(errors_of_hooks({"mine", ""}, false),
                     "have different communication hooks: mine on rank 0 and none on rank 1");
  expect_all_contain(errors_of_hooks({"", "", "mine"}, false),
                     "have different communication hooks: none on rank 0 and mine on rank 2");
  expect_all_contain(errors_of_hooks({"mine", "yours"}, /*late=*/true),
                     "have different communication hooks: mine on rank 0 and yours on rank 1");
  expect_all_contain(errors_of_hooks({"mine", ""}, false, /*inside_join=*/true),
                     "have different communication hooks: mine on rank 0 and none on rank 1");
  for (const bool late : {false, true}) EXPECT_EQ(errors_of_hooks({"a", "a"}, late), Errors(2));
  EXPECT_EQ(errors_of_hooks({"a", "a"}, false, /*inside_join=*/true), Errors(2));
}

using Shapes = std::vector<std::vector<int64_t>>;

/// The errors of the ranks from all_reduce_grads() of parameters "a", "b", ... with these shapes.
Errors errors_of_lists(const std::vector<Shapes>& of_ranks, const Errors& names = {"a", "b", "c"}) {
  return errors_of_ranks(static_cast<int64_t>(of_ranks.size()), [&](const ParallelState& state) {
    const auto rank = static_cast<size_t>(state.rank());
    std::vector<MeshParameter> params;
    for (size_t i = 0; i < of_ranks[rank].size(); ++i) {
      const size_t which = rank == 0 ? i : names.size() - 1 - i;
      params.emplace_back(at::ones(of_ranks[rank][i]).requires_grad_(true),
                          names.size() == 3 ? names[i] : names[which]);
    }
    backward_of(params, 1);
    all_reduce_grads(
        params, DeviceMesh(state, {state.grids().size(GroupKind::dp_cp), 1}, {"dp", "cp"}), false);
  });
}

TEST(FrontChecks, PowerSgdHooksWithOtherSettingsAllThrow) {
  const auto errors = errors_of_ranks(2, [](const ParallelState& state) {
    const auto params = testing::named({at::ones({8, 8})});
    Reducer reducer(params, replicas(state));
    reducer.register_comm_hook(std::make_shared<CompressHook>(
        at::kBFloat16,
        std::make_shared<PowerSgdHook>(PowerSgdOptions{
            .start_iteration = 0, .seed = 5 + static_cast<uint64_t>(state.rank())})));
    testing::reduce(reducer, [&] { return linear_loss(params, {0}, 1); });
  });
  expect_all_contain(errors, "have different communication hooks: bf16-compress(powerSGD(rank 1");
  expect_all_contain(errors, "seed 6)) on rank 1");
}

TEST(FrontChecks, AllReduceGradsRefusesListsThatDiffer) {
  expect_all_contain(errors_of_lists({{{2, 3}}, {{3, 2}}}),
                     "have different parameters: parameter 'a' is [2, 3] Float, trained");
  expect_all_contain(errors_of_lists({{{2}}, {{2}}, {{2}, {5}}}),
                     "rank 0 has 1 parameters and rank 2 has 2; 'b' is on rank 2 only");
  expect_all_contain(errors_of_lists({{{2}, {2}}, {{2}, {2}}}, {"x", "y"}),
                     "parameter 0 is 'x' on rank 0 and 'y' on rank 1");
  EXPECT_EQ(errors_of_lists({{{2}, {5}}, {{2}, {5}}}), Errors(2));
}

TEST(FrontChecks, AComplexParameterIsRefusedByName) {
  const ParallelState alone = ParallelState::single_process();
  const std::string expected = "parameter 'phase': ComplexFloat cannot be trained";
  const at::Tensor tensor = at::ones({2}, at::kComplexFloat).requires_grad_(true);
  for (const auto& [front, set_up] : kFronts)
    EXPECT_TRUE(throws_with<UsageError>(
        [&, &construct = set_up] {
          construct({{"phase", tensor, default_description(tensor)}}, alone);
        },
        expected))
        << front;
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        GradientSynchronizer({{ones_on(DeviceMesh(alone, {1}, {"dp"}), {2}, {Replicate{}}, "phase",
                                       at::kComplexFloat)}},
                             1, 1)
            .bind();
      },
      expected));
}

TEST(FrontChecks, AllReduceGradsRefusesGradientsThatCannotBeWrittenInPlace) {
  const auto errors_of = [](const at::Tensor& odd) {
    return errors_of_ranks(2, [&](const ParallelState& state) {
      const at::Tensor table = at::ones({3, 2}, odd.options()).requires_grad_(true);
      table.mutable_grad() = state.rank() == 1 ? odd : at::ones({3, 2}, odd.options());
      all_reduce_grads({MeshParameter(table, "table")}, DeviceMesh(state, {2, 1}, {"dp", "cp"}),
                       false);
    });
  };
  expect_all_contain(errors_of(at::ones({1, 2}).expand({3, 2})),
                     "all_reduce_grads: the gradient of 'table' has elements that share memory, "
                     "allowed: dense gradients");
  expect_all_contain(errors_of(at::ones({3, 2}, at::kComplexFloat)),
                     "all_reduce_grads: the gradient of 'table' is not a floating-point tensor");
}

}  // namespace
}  // namespace lockstep
