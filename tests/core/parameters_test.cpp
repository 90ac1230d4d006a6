#include "lockstep/core/parameters.h"

#include <gtest/gtest.h>

#include <torch/nn/modules/linear.h>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

struct DescribedImpl : DescribedModule {
  DescribedImpl() {
    ParamDescription description;
    description.placements[MeshAxis::tp] = Shard{0};
    weight = register_described_parameter("weight", at::zeros({2, 3}), description);
    plain = register_parameter("plain", at::zeros({4}));
  }
  at::Tensor weight, plain;
};

struct Model : torch::nn::Module {
  Model() {
    first = register_module("first", std::make_shared<DescribedImpl>());
    head = register_module("head", torch::nn::Linear(3, 2));
    register_parameter("tied", first->weight);
  }
  std::shared_ptr<DescribedImpl> first;
  torch::nn::Linear head{nullptr};
};

TEST(CollectParameters, NamesOrderDescriptionsAndTies) {
  const auto parameters = collect_parameters(Model());
  std::vector<std::string> names;
  for (const auto& parameter : parameters) names.push_back(parameter.name);
  // "tied" is registered in the root, so it is first; "first.weight" is the same tensor.
  EXPECT_EQ(names, (std::vector<std::string>{"tied", "first.plain", "head.weight", "head.bias"}));
  EXPECT_TRUE(parameters[2].description.apply_weight_decay);
  EXPECT_FALSE(parameters[3].description.apply_weight_decay);
}

TEST(CollectParameters, DescribedParametersKeepTheirDescription) {
  const auto parameters = collect_parameters(DescribedImpl());
  ASSERT_EQ(parameters.size(), 2u);
  EXPECT_EQ(parameters[0].description.placement(MeshAxis::tp), Placement(Shard{0}));
  EXPECT_EQ(parameters[1].description.placement(MeshAxis::tp), Placement(Replicate{}));
}

TEST(DescribedModule, RefusesADescriptionThatContradictsItself) {
  struct Wrong : DescribedModule {
    Wrong() { register_described_parameter("weight", at::zeros({1}), {.tie = Tie{}}); }
  };
  EXPECT_THROW(Wrong(), UsageError);
}

TEST(FillNormal, EveryBlockOfEveryLayoutEqualsTheWhole) {
  const std::vector<int64_t> shape = {4, 6, 5};
  at::Tensor whole = at::empty(shape, at::kDouble);
  fill_normal(whole, 0.5, 11, "layers.0.weight", shape);
  for (int64_t dim = 0; dim < 3; ++dim) {
    for (int64_t start = 0; start < shape[dim]; ++start) {
      for (int64_t length = 1; start + length <= shape[dim]; ++length) {
        const at::Tensor expected = whole.narrow(dim, start, length);
        at::Tensor block = at::empty(expected.sizes(), at::kDouble);
        std::vector<int64_t> offset(3, 0);
        offset[dim] = start;
        fill_normal(block, 0.5, 11, "layers.0.weight", shape, offset);
        ASSERT_TRUE(at::equal(block, expected)) << dim << " " << start << " " << length;
      }
    }
  }
}

TEST(FillNormal, LowerPrecisionsAreRoundedFromTheSameValues) {
  at::Tensor wide = at::empty({8, 8}, at::kDouble), narrow = at::empty({8, 8}, at::kBFloat16);
  fill_normal(wide, 1, 1, "w", {8, 8});
  fill_normal(narrow, 1, 1, "w", {8, 8});
  EXPECT_TRUE(at::equal(narrow, wide.to(at::kBFloat16)));
}

TEST(FillNormal, WrongRankIsRefused) {
  at::Tensor tensor = at::empty({2, 2});
  EXPECT_THROW(fill_normal(tensor, 1, 1, "w", {4}), UsageError);
}

}  // namespace
}  // namespace lockstep
