#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <random>

#include <ATen/ATen.h>

#include "lockstep/parallel_state/dtensor.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

using nlohmann::json;
using testing::run_ranks;
using Placements = std::vector<Placement>;

Placements parse(const json& texts) {
  static const std::map<std::string, Placement> named = {{"R", Replicate{}},
                                                         {"sum", Partial{ReduceOp::sum}},
                                                         {"avg", Partial{ReduceOp::average}},
                                                         {"max", Partial{ReduceOp::max}},
                                                         {"min", Partial{ReduceOp::min}}};
  Placements placements;
  for (const std::string text : texts)
    placements.push_back(text[0] == 'S' ? Shard{std::stoll(text.substr(1))} : named.at(text));
  return placements;
}

/// The formulas of scripts/golden/dtensor.py.
at::Tensor term(const std::vector<int64_t>& shape, int64_t ordinal) {
  const at::Tensor i = at::arange(c10::multiply_integers(shape), at::kDouble);
  return (24 * ((i * 7 + i * i + 13 * ordinal).remainder(41) - 20)).view(shape);
}

std::vector<int64_t> numbers_of(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.flatten(), i = at::arange(flat.numel(), at::kDouble);
  const at::Tensor numbers =
      flat.numel() <= 6 ? flat
                        : at::stack({flat.sum(), (flat * (i + 1)).sum(),
                                     (flat * (i * i * 31 + i * 17 + 5).remainder(101)).sum()});
  const at::Tensor whole = numbers.to(at::kLong).contiguous();
  return {whole.const_data_ptr<int64_t>(), whole.const_data_ptr<int64_t>() + whole.numel()};
}

DTensor source_tensor(const DeviceMesh& mesh, const std::vector<int64_t>& shape,
                      const Placements& placements) {
  int64_t ordinal = 0;
  Placements shards = placements;
  for (size_t axis = 0; axis < placements.size(); ++axis)
    if (std::holds_alternative<Partial>(placements[axis])) {
      ordinal = ordinal * mesh.shape()[axis] + mesh.get_coordinate()->at(axis);
      shards[axis] = Replicate{};
    }
  const DTensor cut = distribute_tensor(term(shape, ordinal), mesh, shards);
  return DTensor::from_local(cut.to_local(), mesh, placements, shape);
}

void expect_case(const DeviceMesh& mesh, const json& golden, int64_t rank) {
  const std::string name = golden["mesh"].dump() + golden["shape"].dump() + golden["from"].dump() +
                           golden["to"].dump() + " rank " + std::to_string(rank);
  const DTensor source = source_tensor(mesh, golden["shape"], parse(golden["from"]));
  const DTensor result = source.redistribute(parse(golden["to"]));
  const json& expected = golden["local"][static_cast<size_t>(rank)];
  const std::vector<int64_t> shape = expected[0], offset = expected[1], numbers = expected[2];
  ASSERT_EQ(result.to_local().sizes().vec(), shape) << name;
  EXPECT_EQ(result.local_offset(), offset) << name;
  EXPECT_EQ(numbers_of(result.to_local()), numbers) << name;
  EXPECT_TRUE(result.to_local().is_contiguous()) << name;
  EXPECT_TRUE(at::equal(result.full_tensor(), source.full_tensor())) << name;
}

TEST(DTensor, EqualsPyTorchsDTensor) {
  std::ifstream file(LOCKSTEP_SOURCE_DIR "/tests/parallel_state/dtensor_golden.json");
  std::map<std::vector<int64_t>, std::vector<json>> by_mesh;
  int cases = 0;
  for (const json& golden : json::parse(file)) {
    by_mesh[golden["mesh"]].push_back(golden);
    ++cases;
  }
  EXPECT_EQ(cases, 450);
  for (const auto& [shape, goldens] : by_mesh) {
    const std::vector<std::string> names = {"a0", "a1", "a2"};
    run_ranks(c10::multiply_integers(shape), [&](const ParallelState& state) {
      const DeviceMesh mesh(state, shape, {names.begin(), names.begin() + shape.size()});
      for (const json& golden : goldens) expect_case(mesh, golden, state.rank());
    });
  }
}

/// Distributing the whole tensor again gives the same as redistribute(), on meshes that PyTorch's
/// cases do not cover.
TEST(DTensor, RandomPlacementsOfFourAxes) {
  run_ranks(8, [](const ParallelState& state) {
    const DeviceMesh mesh(state, {2, 1, 2, 2}, {"a", "b", "c", "d"});
    const at::Tensor full = term({5, 3, 2}, 1);
    std::mt19937 random(7);  // the same on all ranks
    const auto draw = [&](bool source) {
      Placements placements;
      while (placements.size() < 4) {
        const auto kind = static_cast<int64_t>(random() % 6) - 1;
        placements.push_back(kind < 3 ? Placement(Shard{kind})
                             : source ? Placement(Partial{ReduceOp::max})
                                      : Placement(Replicate{}));
      }
      return placements;
    };
    for (int i = 0; i < 100; ++i) {
      const Placements from = draw(true), to = draw(false);
      const DTensor result = distribute_tensor(full, mesh, from).redistribute(to);
      ASSERT_TRUE(at::equal(result.to_local(), distribute_tensor(full, mesh, to).to_local()))
          << to_string(from) << " to " << to_string(to) << " on rank " << state.rank();
    }
  });
}

}  // namespace
}  // namespace lockstep
