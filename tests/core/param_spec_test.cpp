#include "lockstep/core/param_spec.h"

#include <gtest/gtest.h>

#include <map>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using Ints = std::vector<int64_t>;

MeshPlace place_of(std::map<MeshAxis, AxisPlace> places) {
  return [places = std::move(places)](MeshAxis axis) { return places.at(axis); };
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(LocalPiece, IsTheWholeWhereNothingCuts) {
  const ParamSpec spec{"weight", {4, 6}, NormalValues{1}, {}};
  const LocalPiece whole{{4, 6}, {0, 0}};
  EXPECT_EQ(local_piece(spec, {}), whole);
  // Looks up no axis: the map is empty.
  EXPECT_EQ(local_piece(spec, place_of({})), whole);
}

TEST(LocalPiece, EachAxisCutsItsDimension) {
  const ParamSpec spec{
      "weight",
      {8, 2, 6},
      NormalValues{1},
      {.placements = {{MeshAxis::ep, Shard{0}}, {MeshAxis::etp, Shard{2}}}, .is_expert = true}};
  const LocalPiece piece =
      local_piece(spec, place_of({{MeshAxis::ep, {3, 4}}, {MeshAxis::etp, {1, 2}}}));
  EXPECT_EQ(piece.shape, (Ints{2, 2, 3}));
  EXPECT_EQ(piece.offset, (Ints{6, 0, 3}));
}

TEST(LocalPiece, ANegativeDimensionCountsFromTheLast) {
  const ParamSpec spec{
      "weight", {4, 6}, NormalValues{1}, {.placements = {{MeshAxis::tp, Shard{-1}}}}};
  EXPECT_EQ(local_piece(spec, place_of({{MeshAxis::tp, {1, 2}}})), (LocalPiece{{4, 3}, {0, 3}}));
}

TEST(LocalPiece, OfTwoAxesThatCutOneDimensionTheFirstInMeshAxisCutsFirst) {
  const ParamSpec spec{
      "weight",
      {12},
      ConstantValue{},
      {.placements = {{MeshAxis::ep, Shard{0}}, {MeshAxis::etp, Shard{0}}}, .is_expert = true}};
  for (int64_t etp = 0; etp < 2; ++etp)
    for (int64_t ep = 0; ep < 3; ++ep) {
      const LocalPiece piece =
          local_piece(spec, place_of({{MeshAxis::etp, {etp, 2}}, {MeshAxis::ep, {ep, 3}}}));
      EXPECT_EQ(piece.shape, Ints{2});
      EXPECT_EQ(piece.offset, Ints{6 * etp + 2 * ep});
    }
}

TEST(LocalPiece, WhatCannotBeCutIsRefusedByName) {
  const ParamSpec odd{
      "mlp.weight", {5, 4}, NormalValues{1}, {.placements = {{MeshAxis::tp, Shard{0}}}}};
  EXPECT_EQ(error_of([&] {
              local_piece(odd, place_of({{MeshAxis::tp, {0, 2}}}));
            }),
            "parameter 'mlp.weight': dimension 0 has size 5, allowed: a multiple of the 2 ranks "
            "of tp");
  const ParamSpec flat{
      "mlp.bias", {4}, ConstantValue{}, {.placements = {{MeshAxis::tp, Shard{1}}}}};
  EXPECT_EQ(error_of([&] {
              local_piece(flat, place_of({{MeshAxis::tp, {0, 2}}}));
            }),
            "parameter 'mlp.bias': found Shard(1) over tp, allowed: one of its 1 dimensions");
}

ModuleSpec two_layers() {
  ModuleSpec leaf;
  leaf.add({"weight", {2}, ConstantValue{1}, {}});
  leaf.add({"bias", {2}, ConstantValue{0}, {}});
  ModuleSpec root;
  root.add({"scale", {1}, ConstantValue{1}, {}});
  root.add_child("first", leaf);
  ModuleSpec list;
  list.add_child("0", leaf);
  root.add_child("layers", list);
  return root;
}

TEST(ModuleSpec, ListsItsParametersUnderDottedNamesInOrder) {
  std::vector<std::string> names;
  for (const ParamSpec& param : two_layers().all("model.")) names.push_back(param.name);
  EXPECT_EQ(names,
            (std::vector<std::string>{"model.scale", "model.first.weight", "model.first.bias",
                                      "model.layers.0.weight", "model.layers.0.bias"}));
}

TEST(ModuleSpec, WhatItDoesNotStateIsRefusedWithTheNamesThatThereAre) {
  const ModuleSpec root = two_layers();
  const ModuleSpec& first = root.child("first");
  EXPECT_EQ(first.find("weight"), &first.params[0]);
  EXPECT_EQ(first.find("wieght"), nullptr);
  EXPECT_EQ(error_of([&] { first.at("wieght"); }),
            "module 'first': found no parameter 'wieght' in its specification, allowed: weight, "
            "bias");
  EXPECT_EQ(error_of([&] { root.child("layer"); }),
            "module '': found no child 'layer' in its specification, allowed: first, layers");
  EXPECT_EQ(error_of([&] { first.child("inner"); }),
            "module 'first': found no child 'inner' in its specification, allowed: none");
}

}  // namespace
}  // namespace lockstep
