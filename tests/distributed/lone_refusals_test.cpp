// Errors or differences on one rank only: every rank gets an error that names them, and none waits
// for the timeout.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/all_reduce_grads.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/distributed/reducer.h"
#include "lockstep/optimizer/clip_grad_norm.h"
#include "lockstep/optimizer/clip_grads.h"
#include "lockstep/optimizer/optimizer.h"
#include "lockstep/tests/support/mesh_params.h"
#include "lockstep/tests/support/open_ranks.h"

namespace lockstep {
namespace {

using testing::errors_of_open_ranks;
using testing::expect_all_contain;
using testing::ones_on;
using testing::RankThreadOptions;

NamedParameter vector_called(const std::string& name, int64_t length = 4) {
  const at::Tensor tensor = at::ones({length}).requires_grad_(true);
  return {name, tensor, default_description(tensor)};
}

RankThreadOptions with_tensor(int64_t ranks) {
  RankThreadOptions options;
  options.sizes.tensor = ranks;
  return options;
}

/// The arguments of a GradientSynchronizer.
struct SynchronizerSetUp {
  std::vector<MeshParameter> params;
  double megabytes = 1;
  int64_t accumulations = 1;
  GradientSynchronizerOptions options = {};

  void run() const { GradientSynchronizer({params}, megabytes, accumulations, options).bind(); }
};

/// A difference on the faulty rank, and a part of the error that names it.
struct SynchronizerFault {
  std::string part;
  std::function<void(SynchronizerSetUp&, const DeviceMesh&)> add;
};

const std::vector<SynchronizerFault> kSynchronizerFaults = {
    {"parameter 1 ('nil'): the tensor is undefined",
     [](auto& set_up, const DeviceMesh&) { set_up.params.emplace_back(at::Tensor(), "nil"); }},
    {"two parameters are called 'norm'",
     [](auto& set_up, const DeviceMesh& mesh) {
       set_up.params.push_back(ones_on(mesh, {4}, {Replicate{}, Replicate{}}, "norm"));
     }},
    {"bucket_size_mb: found 0", [](auto& set_up, const DeviceMesh&) { set_up.megabytes = 0; }},
    {"require_accumulations: found 0",
     [](auto& set_up, const DeviceMesh&) { set_up.accumulations = 0; }},
    {"token_group: found none with the reduction per-token",
     [](auto& set_up, const DeviceMesh&) {
       set_up.options.reduction = GradientReduction::per_token;
     }},
    {"parameter 'norm': found Partial(sum) on axis 'dp'",
     [](auto& set_up, const DeviceMesh& mesh) {
       set_up.params = {MeshParameter(
           DTensor::from_local(at::ones({4}).requires_grad_(true), mesh, {Partial{}, Replicate{}}),
           "norm")};
     }},
    {"parameter 'norm': complete on axis 'ep'",
     [](auto& set_up, const DeviceMesh&) { set_up.params.front().complete_axes = {"ep"}; }},
    {"['norm' on tp] on rank",
     [](auto& set_up, const DeviceMesh&) { set_up.params.front().complete_axes = {"tp"}; }},
    {"parameter 'norm' is not a leaf",
     [](auto& set_up, const DeviceMesh& mesh) {
       set_up.params = {MeshParameter(DTensor::from_local(at::ones({4}).requires_grad_(true) * 2,
                                                          mesh, {Replicate{}, Replicate{}}),
                                      "norm")};
     }},
};

TEST(LoneRefusals, WhatOneRankOfAGradientSynchronizerRefusesEndsAll) {
  for (const auto& [part, add] : kSynchronizerFaults)
    for (const std::vector<int64_t>& shape : {std::vector<int64_t>{2, 1}, {2, 2}})
      for (const int64_t at_fault : {int64_t{0}, shape[0] * shape[1] - 1}) {
        if (part.starts_with("[") && shape[1] == 1) continue;  // complete on one rank
        const auto errors = errors_of_open_ranks(
            shape[0] * shape[1], [&, &fault = add](const ParallelState& state) {
              const DeviceMesh mesh(state, shape, {"dp", "tp"});
              SynchronizerSetUp set_up;
              set_up.params = {ones_on(mesh, {4}, {Replicate{}, Replicate{}}, "norm")};
              if (state.rank() == at_fault) fault(set_up, mesh);
              set_up.run();
            });
        expect_all_contain(errors, part, "rank " + std::to_string(at_fault) + " at fault");
      }
}

using List = std::vector<NamedParameter>;

struct ListFault {
  std::string part;
  std::function<void(List&)> add;
};

const std::vector<ListFault> kListFaults = {
    {"parameter 'w' is not a leaf", [](List& list) { list[0].tensor = list[0].tensor * 2; }},
    {"parameter 'w' is sparse",
     [](List& list) { list[0].tensor = at::ones({4}).to_sparse().requires_grad_(true); }},
    {"parameter 'w': found a description over etp",
     [](List& list) {
       list[0].description.gradient_states[MeshAxis::etp] = GradientState::partial_sum;
     }},
    {"parameter 'w': found Shard(3) over tp",
     [](List& list) { list[0].description.placements[MeshAxis::tp] = Shard{3}; }},
    {"parameter 'w' has elements that share memory",
     [](List& list) { list[0].tensor = at::ones({1}).expand({4}).requires_grad_(true); }},
    {"parameters 'w' and 'b' share memory",
     [](List& list) { list[1].tensor = list[0].tensor.detach().requires_grad_(true); }},
};

TEST(LoneRefusals, AListThatOneRankOfDistributedDataParallelRefusesEndsAll) {
  for (const auto& [part, add] : kListFaults)
    for (const int64_t tensor : {1, 2}) {
      const auto errors = errors_of_open_ranks(
          2 * tensor,
          [&, &fault = add](const ParallelState& state) {
            List list = {vector_called("w"), vector_called("b")};
            if (state.rank() == state.world_size() - 1) fault(list);
            DistributedDataParallel(list, state);
          },
          with_tensor(tensor));
      expect_all_contain(errors, part, "tp of " + std::to_string(tensor));
    }
}

TEST(LoneRefusals, ColumnsOfOneMatrixShareNoElementsAndAreTaken) {
  const at::Tensor whole = at::ones({3, 4});
  List list;
  for (const int64_t column : {0, 2}) {
    const at::Tensor part = whole.narrow(1, column, 2).detach().requires_grad_(true);
    list.push_back({column == 0 ? "left" : "right", part, default_description(part)});
  }
  EXPECT_NO_THROW(DistributedDataParallel(list, ParallelState::single_process()));
}

TEST(LoneRefusals, AListThatOneRankOfAReducerRefusesEndsAll) {
  for (const auto& [part, add] : kListFaults) {
    if (part.find("share memory") != std::string::npos && part.starts_with("parameters")) continue;
    const auto errors = errors_of_open_ranks(2, [&, &fault = add](const ParallelState& state) {
      List list = {vector_called("w"), vector_called("b")};
      if (state.rank() == 1) fault(list);
      Reducer(list, state.group(GroupKind::dp_cp));
    });
    expect_all_contain(errors, part, "Reducer");
  }
}

TEST(LoneRefusals, MatricesThatAreWholeOnOneRankOnlyAreNamed) {
  const auto errors = errors_of_open_ranks(2, [](const ParallelState& state) {
    const at::Tensor matrix = at::ones({3, 2}).requires_grad_(true);
    const auto layout = state.rank() == 1 ? MatrixLayout::whole : MatrixLayout::cut;
    DistributedDataParallel(
        {{"matrix", matrix, {.update = ParamUpdate::matrix}}, vector_called("bias")}, state, {},
        /*disable_bucketing=*/false, layout);
  });
  expect_all_contain(errors, "matrices is cut on rank 0 and whole on rank 1", "");
}

/// The errors of the two tensor-parallel ranks after rank 1 has changed its list.
std::vector<std::string> errors_over_tp(const std::function<void(List&)>& change) {
  return errors_of_open_ranks(
      2,
      [&](const ParallelState& state) {
        List list = {vector_called("norm"), vector_called("w")};
        list[0].description.gradient_states[MeshAxis::tp] = GradientState::partial_sum;
        if (state.rank() == 1) change(list);
        DistributedDataParallel ddp(list, state);
        finalize_model_grads({&ddp}, at::ones({}));
      },
      with_tensor(2));
}

TEST(LoneRefusals, AParameterThatIsPartialOnOneTensorParallelRankOnlyIsNamed) {
  expect_all_contain(errors_over_tp([](List& list) { list[0].description.gradient_states = {}; }),
                     "'norm' is on rank 0 only", "complete on rank 1");
  expect_all_contain(errors_over_tp([](List& list) { list.erase(list.begin()); }),
                     "'norm' is on rank 0 only", "absent on rank 1");
}

TEST(LoneRefusals, SettingsOfAParameterThatTensorParallelRanksShareAreCompared) {
  expect_all_contain(
      errors_over_tp([](List& list) { list[1].tensor.requires_grad_(false); }),
      "parameter 'w' is trained, no weight decay on rank 0 and frozen, no weight decay on rank 1",
      "frozen");
  expect_all_contain(
      errors_over_tp([](List& list) { list[1].description.apply_weight_decay = true; }),
      "parameter 'w' is trained, no weight decay on rank 0 and trained on rank 1", "weight decay");
}

TEST(LoneRefusals, TensorParallelRanksMayHoldOtherParametersBesides) {
  EXPECT_EQ(errors_of_open_ranks(
                2,
                [](const ParallelState& state) {
                  List list = {vector_called("norm")};
                  list[0].description.gradient_states[MeshAxis::tp] = GradientState::partial_sum;
                  if (state.rank() == 1) list.push_back(vector_called("own"));
                  DistributedDataParallel ddp(list, state);
                },
                with_tensor(2)),
            std::vector<std::string>(2));
}

TEST(LoneRefusals, AllReduceGradsTellsAllRanks) {
  const auto undefined = errors_of_open_ranks(2, [](const ParallelState& state) {
    std::vector<MeshParameter> list = {MeshParameter(at::ones({2}).requires_grad_(true), "w")};
    if (state.rank() == 1) list.emplace_back(at::Tensor(), "nil");
    all_reduce_grads(list, DeviceMesh(state, {2, 1}, {"dp", "cp"}), false);
  });
  expect_all_contain(undefined, "parameter 1 ('nil'): the tensor is undefined", "");
  const auto axes = errors_of_open_ranks(2, [](const ParallelState& state) {
    const std::string second = state.rank() == 1 ? "pc" : "cp";
    all_reduce_grads({MeshParameter(at::ones({2}).requires_grad_(true), "w")},
                     DeviceMesh(state, {2, 1}, {"dp", second}), false);
  });
  expect_all_contain(axes, "'cp'", "");
}

TEST(LoneRefusals, NormsTellAllRanks) {
  for (const bool bad_type : {true, false}) {
    const char* const part = bad_type ? "norm_type: found -1" : "max_norm: found -1";
    const auto of_meshes = errors_of_open_ranks(2, [&](const ParallelState& state) {
      const DeviceMesh mesh(state, {2}, {"tp"});
      const MeshParameters list = {ones_on(mesh, {4}, {Shard{0}}, "w")};
      testing::backward_of(list, 1);
      const bool at_fault = state.rank() == 1;
      clip_grad_norm_(list, at_fault && !bad_type ? -1 : 1, at_fault && bad_type ? -1 : 2);
    });
    expect_all_contain(of_meshes, part, "meshes");
    const auto of_models = errors_of_open_ranks(
        2,
        [&](const ParallelState& state) {
          DistributedDataParallelConfig config;
          config.calculate_per_token_loss = false;
          const List list = {vector_called("w")};
          DistributedDataParallel ddp(list, state, config);
          list[0].tensor.sum().backward();
          finalize_model_grads({&ddp});
          const bool at_fault = state.rank() == 1;
          clip_grad_norm_(std::vector{&ddp}, at_fault && !bad_type ? -1 : 1,
                          at_fault && bad_type ? -1 : 2);
        },
        with_tensor(2));
    expect_all_contain(of_models, part, "models");
  }
}

TEST(LoneRefusals, ABackwardThatReachesNoParameterEndsAllRanksOfAReducer) {
  const auto errors = errors_of_open_ranks(2, [](const ParallelState& state) {
    const List list = {vector_called("w")};
    const at::Tensor other = at::ones({4}).requires_grad_(true);
    Reducer reducer(list, state.group(GroupKind::dp_cp));
    reducer.prepare_for_forward();
    const at::Tensor loss = (state.rank() == 1 ? other : list[0].tensor).sum();
    reducer.prepare_for_backward({loss});
    loss.backward();
    reducer.finalize_backward();
  });
  expect_all_contain(errors, "1 of 1 parameters received no gradient: 0 ('w')", "");
}

TEST(LoneRefusals, SeveralPreparedBackwardsOfAReducerMayBeFinalizedOneByOne) {
  testing::run_ranks(2, [](const ParallelState& state) {
    const List list = {vector_called("w")};
    Reducer reducer(list, state.group(GroupKind::dp_cp));
    std::vector<at::Tensor> losses;
    for (int i = 0; i < 2; ++i) {
      reducer.prepare_for_forward();
      losses.push_back(list[0].tensor.sum() * (state.rank() + 1));
      reducer.prepare_for_backward({losses.back()});
    }
    for (size_t i = 0; i < losses.size(); ++i) {
      losses[i].backward();
      reducer.finalize_backward();
      const double mean = 1.5 * static_cast<double>(i + 1);  // mean of 1 and 2, accumulated
      EXPECT_TRUE(at::equal(list[0].tensor.grad(), at::full_like(list[0].tensor, mean)))
          << list[0].tensor.grad();
    }
  });
}

TEST(LoneRefusals, OverridesThatDifferAreNamedOverEveryAxis) {
  for (const bool over_tp : {false, true}) {
    const auto errors = errors_of_open_ranks(
        2,
        [](const ParallelState& state) {
          DistributedDataParallel ddp(List{vector_called("w")}, state);
          const double multiple = state.rank() == 0 ? 0.5 : 0.25;
          Optimizer({&ddp}, {}, {{.applies_to = matches_name("w"), .wd_mult = multiple}});
        },
        with_tensor(over_tp ? 2 : 1));
    expect_all_contain(errors,
                       "overrides is [ wd_mult 0.5 ] on rank 0 and [ wd_mult 0.25 ] on rank 1", "");
  }
}

}  // namespace
}  // namespace lockstep
