#include "lockstep/parallel_state/dtensor.h"

#include <gtest/gtest.h>

#include <map>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::errors_of_ranks;
using testing::run_ranks;
using testing::throws_with;
using Placements = std::vector<Placement>;

at::Tensor counted(const std::vector<int64_t>& shape) {
  return at::arange(c10::multiply_integers(shape), at::kDouble).view(shape);
}

/// The calls of rank 1 when `from` becomes `to` on one axis of `world` ranks: "all_gather 24".
std::vector<std::string> sent(int64_t world, const std::vector<int64_t>& shape,
                              const Placement& from, const Placement& to) {
  CollectiveLog log;
  run_ranks(world,
            [&](const ParallelState& state) {
              const DeviceMesh mesh(state, {world}, {"dp"});
              const DTensor tensor = distribute_tensor(counted(shape), mesh, {from});
              const DTensor result = tensor.redistribute({to});
              const DTensor expected = distribute_tensor(counted(shape), mesh, {to});
              EXPECT_TRUE(at::allclose(result.to_local(), expected.to_local()));
            },
            {.log = &log});
  std::vector<std::string> calls;
  for (const auto& call : log.of_rank(1))
    calls.push_back(call.operation + " " + std::to_string(call.bytes));
  return calls;
}

TEST(DTensorCommunication, EachPairOfPlacementsCostsOneCollective) {
  using Calls = std::vector<std::string>;
  const Placement whole = Replicate{}, rows = Shard{0}, columns = Shard{1}, terms = Partial{};
  // Of 4 x 6 numbers in fp64, two ranks hold 96 bytes each.
  EXPECT_EQ(sent(2, {4, 6}, rows, whole), Calls{"all_gather 96"});
  EXPECT_EQ(sent(2, {4, 6}, columns, whole), Calls{"all_gather 96"});
  EXPECT_EQ(sent(2, {4, 6}, rows, columns), Calls{"all_to_all 96"});
  EXPECT_EQ(sent(2, {4, 6}, terms, whole), Calls{"all_reduce (sum) 192"});
  EXPECT_EQ(sent(2, {4, 6}, terms, rows), Calls{"reduce_scatter (sum) 192"});
  EXPECT_EQ(sent(2, {4, 6}, terms, columns), Calls{"reduce_scatter (sum) 192"});
  EXPECT_EQ(sent(2, {4, 6}, whole, rows), Calls{});
  EXPECT_EQ(sent(2, {4, 6}, rows, rows), Calls{});
  // Three ranks hold 2, 2 and 1 of 5 rows.
  EXPECT_EQ(sent(3, {5, 2}, rows, whole), Calls{"all_gather 32"});
  EXPECT_EQ(sent(3, {5, 2}, rows, columns), Calls{"all_to_all 32"});
  EXPECT_EQ(sent(3, {5, 2}, terms, rows), Calls{"reduce_scatter (sum) 96"});  // as 6 rows
}

TEST(DTensorCommunication, NothingIsSentForNothing) {
  for (const auto& from : Placements{Shard{0}, Shard{1}, Partial{}})
    for (const auto& to : Placements{Replicate{}, Shard{0}, Shard{1}})
      EXPECT_TRUE(sent(2, {0, 3}, from, to).empty()) << to_string(from) << " " << to_string(to);
  const ParallelState state = ParallelState::single_process();
  const DeviceMesh mesh(state, {1, 1}, {"dp", "tp"});
  const DTensor tensor = distribute_tensor(counted({3}), mesh, {Partial{}, Shard{0}});
  EXPECT_TRUE(at::equal(tensor.full_tensor(), counted({3})));
}

TEST(DTensorCommunication, CuttingAReplicaNeedsNoPeer) {
  run_ranks(2, [](const ParallelState& state) {
    if (state.rank() == 1) return;
    const DeviceMesh mesh(state, {2}, {"dp"});
    const DTensor whole = distribute_tensor(counted({3, 2}), mesh, {Replicate{}});
    const at::Tensor rows = whole.redistribute({Shard{0}}).to_local();
    EXPECT_TRUE(at::equal(rows, counted({2, 2})));
  });
}

TEST(DTensor, TheOriginalStaysAsItIs) {
  run_ranks(2, [](const ParallelState& state) {
    const DeviceMesh mesh(state, {2}, {"dp"});
    const at::Tensor local = at::full({2, 2}, state.rank() + 1.0, at::kDouble);
    for (const Placement& from : Placements{Partial{}, Shard{0}}) {
      const DTensor tensor = DTensor::from_local(local, mesh, {from});
      EXPECT_TRUE(tensor.to_local().is_same(local));
      for (const Placement& to : Placements{Replicate{}, Shard{0}, Shard{1}}) {
        at::Tensor changed = tensor.redistribute({to}).to_local();
        if (from != to) changed.zero_();
        EXPECT_TRUE(at::equal(local, at::full({2, 2}, state.rank() + 1.0, at::kDouble)));
      }
    }
    at::Tensor full = counted({2, 2});
    distribute_tensor(full, mesh, {Shard{0}}).to_local().zero_();
    EXPECT_TRUE(at::equal(full, counted({2, 2})));
  });
}

TEST(DTensor, LocalTensorsMayHaveAnyStridesTypesAndGradients) {
  run_ranks(3, [](const ParallelState& state) {
    const DeviceMesh mesh(state, {3}, {"dp"});
    const at::Tensor transposed = counted({3, 4}).t();
    const auto from_rows =
        DTensor::from_local(transposed, mesh, {Shard{0}}, {12, 3}).redistribute({Shard{1}});
    EXPECT_TRUE(
        at::equal(from_rows.to_local(), transposed.repeat({3, 1}).narrow(1, state.rank(), 1)));
    for (const auto type : {at::kInt, at::kLong, at::kFloat, at::kBFloat16}) {
      const at::Tensor ones = at::ones({2, 3}, type);
      const DTensor sum = DTensor::from_local(ones, mesh, {Partial{}});
      EXPECT_EQ(sum.dtype(), type);
      EXPECT_TRUE(at::equal(sum.full_tensor(), ones * 3)) << type;
      EXPECT_TRUE(at::equal(sum.redistribute({Shard{-1}}).to_local(), at::full({2, 1}, 3, type)));
    }
    const at::Tensor weight = at::ones({2}, at::kDouble).set_requires_grad(true);
    EXPECT_FALSE(DTensor::from_local(weight, mesh, {Partial{}}).full_tensor().requires_grad());
  });
}

TEST(DTensor, ShapeAndOffsetOfTheWholeTensor) {
  run_ranks(4, [](const ParallelState& state) {
    const DeviceMesh mesh(state, {2, 2}, {"dp", "tp"});
    const auto even = DTensor::from_local(at::ones({3, 2}), mesh, {Shard{0}, Shard{0}});
    EXPECT_EQ(even.shape(), (std::vector<int64_t>{12, 2}));
    EXPECT_EQ(even.local_offset(), (std::vector<int64_t>{3 * state.rank(), 0}));
    EXPECT_EQ(even.to_string(), "DTensor [12, 2] Float (Shard(0), Shard(0)) on dp=2 x tp=2");
    const int64_t rows[] = {2, 1, 2, 0};  // 5 rows are 3 + 2, cut into 2 + 1 and 1 + 1
    const bool right = rows[state.rank()] == (state.rank() < 1 ? 2 : 1);
    const auto uneven = [&] {
      (void)DTensor::from_local(at::ones({rows[state.rank()], 2}), mesh, {Shard{0}, Shard{-2}},
                                {5, 2});
    };
    if (right) {
      uneven();
    } else {
      EXPECT_TRUE(throws_with<UsageError>(
          uneven,
          "DTensor [5, 2] Float (Shard(0), Shard(0)) on dp=2 x tp=2: the local tensor of "
          "rank " +
              std::to_string(state.rank()) + " has shape [" + std::to_string(rows[state.rank()]) +
              ", 2], allowed: [1, 2]"));
    }
  });
}

TEST(DTensor, RunCheckNamesTheRankThatDiffers) {
  CollectiveLog log;
  run_ranks(3,
            [](const ParallelState& state) {
              const DeviceMesh mesh(state, {3}, {"dp"});
              DTensor::from_local(at::ones({2}), mesh, {Shard{0}}).run_check();
            },
            {.log = &log});
  ASSERT_EQ(log.of_rank(0).size(), 1u);
  EXPECT_EQ(log.of_rank(0)[0].bytes, 8);
  const auto errors = errors_of_ranks(3, [](const ParallelState& state) {
    const DeviceMesh mesh(state, {3}, {"dp"});
    const auto type = state.rank() == 2 ? at::kDouble : at::kFloat;
    DTensor::from_local(at::ones({2}, type), mesh, {Shard{0}}).run_check();
  });
  for (const std::string& error : errors)
    EXPECT_EQ(error,
              "ranks of mesh dp=3 disagree: rank 0 has DTensor [6] Float (Shard(0)) on dp=3, and "
              "rank 2 has DTensor [6] Double (Shard(0)) on dp=3");
}

TEST(DTensor, ItLiesOnPartsOfAMeshToo) {
  run_ranks(8, [](const ParallelState& state) {
    const DeviceMesh mesh(state, {2, 2, 2}, {"dp", "cp", "tp"});
    const DeviceMesh dp_cp = mesh.slice({"dp", "cp"}).flatten();
    const at::Tensor local = at::full({1}, state.rank(), at::kDouble);
    const DTensor joined = DTensor::from_local(local, dp_cp, {Shard{0}});
    const DTensor turned =
        DTensor::from_local(local, mesh.slice({"cp", "dp"}), {Shard{0}, Shard{0}});
    const double tp = state.rank() % 2;
    const auto ranks = [&](const std::vector<double>& even) {
      return at::tensor(even, at::kDouble) + tp;
    };
    EXPECT_TRUE(at::equal(joined.full_tensor(), ranks({0, 2, 4, 6})));
    EXPECT_TRUE(at::equal(turned.full_tensor(), ranks({0, 4, 2, 6})));
  });
}

TEST(DTensor, WhatCannotBeIsNamed) {
  const ParallelState state = ParallelState::single_process();
  const DeviceMesh mesh(state, {1, 1}, {"dp", "tp"});
  const at::Tensor local = at::ones({2, 3});
  const auto refusal = [&](const Placements& placements, const std::string& message) {
    return throws_with<UsageError>([&] { (void)DTensor::from_local(local, mesh, placements); },
                                   message);
  };
  const Placement sum = Partial{}, avg = Partial{ReduceOp::average}, max = Partial{ReduceOp::max};
  EXPECT_TRUE(refusal({Shard{0}}, "placements (Shard(0)): found 1, allowed: 2, one for each axis"));
  EXPECT_TRUE(refusal({Shard{2}, Replicate{}},
                      "Shard(2): the tensor has 2 dimensions, allowed: -2 <= dim < 2"));
  EXPECT_TRUE(refusal({Shard{-3}, Replicate{}}, "Shard(-3): the tensor has 2 dimensions"));
  EXPECT_TRUE(refusal({sum, max}, "placements (Partial(sum), Partial(max)): found two kinds"));
  EXPECT_NO_THROW((void)DTensor::from_local(local, mesh, {sum, avg}));
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        (void)DTensor::from_local(at::Tensor(), mesh, {sum, sum});
      },
      "the local tensor of rank 0 is undefined"));
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        (void)DTensor::from_local(local.to(at::kInt), mesh, {avg, avg});
      },
      "DTensor [2, 3] Int (Partial(avg), Partial(avg)) on dp=1 x tp=1: allowed for "
      "floating-point"));
  const DTensor tensor = DTensor::from_local(local, mesh, {Shard{0}, sum});
  EXPECT_NO_THROW((void)tensor.redistribute({Replicate{}, sum}));
  for (const Placements& target : {Placements{sum, sum}, Placements{Shard{0}, avg}})
    EXPECT_TRUE(throws_with<UsageError>([&] { (void)tensor.redistribute(target); },
                                        "(Shard(0), Partial(sum)) cannot become ("));
  run_ranks(2, [](const ParallelState& two) {
    const DeviceMesh both(two, {2}, {"dp"}), second(two, {1}, {"dp"}, 1);
    EXPECT_TRUE(throws_with<UsageError>(
        [&] { (void)distribute_tensor(at::ones({2}, at::kLong), both, {Partial{}}); },
        "distribute_tensor: Partial(sum) of Long over 2 ranks, allowed: floating-point"));
    if (two.rank() == 1) return;
    EXPECT_TRUE(
        throws_with<UsageError>([&] { (void)distribute_tensor(at::ones({2}), second, {Shard{0}}); },
                                "rank 0 is not in the mesh dp=1 of 1 ranks"));
  });
}

TEST(DTensor, ALazilyConjugatedTensorIsGatheredAsItsValues) {
  run_ranks(2, [](const ParallelState& state) {
    const DeviceMesh mesh(state, {2}, {"dp"});
    for (const int64_t length : {4, 5}) {
      const at::Tensor whole = at::complex(at::arange(length, at::kFloat), at::ones({length}));
      const at::Tensor mine = whole.chunk(2)[static_cast<size_t>(state.rank())].conj();
      const DTensor tensor = DTensor::from_local(mine, mesh, {Shard{0}}, {{length}});
      EXPECT_TRUE(at::equal(tensor.full_tensor(), whole.conj().resolve_conj())) << length;
    }
  });
}

}  // namespace
}  // namespace lockstep
