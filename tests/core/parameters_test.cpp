#include "lockstep/core/parameters.h"

#include <gtest/gtest.h>

#include <torch/nn/modules/linear.h>

#include "lockstep/core/error.h"
#include "lockstep/core/philox.h"
#include "lockstep/tests/support/throws_with.h"

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

TEST(DescribedModule, AddNamesTheWholeParameterWhoseDescriptionContradictsItself) {
  struct Wrong : DescribedModule {
    Wrong() { add({"weight", {2}, ConstantValue{0}, {.tie = Tie{}}}, {.name = "layers.7."}); }
  };
  EXPECT_TRUE(testing::throws_with<UsageError>([] { Wrong(); }, "parameter 'layers.7.weight': "));
}

/// A bias, and a weight that tp cuts by rows. The last rows are padding.
ModuleSpec padded_params() {
  ModuleSpec spec;
  spec.add({"weight",
            {8, 3},
            NormalValues{0.5},
            {.placements = {{MeshAxis::tp, Shard{0}}}, .unpadded_rows = 5}});
  spec.add({"bias", {3}, ConstantValue{2}, {.apply_weight_decay = false}});
  return spec;
}

struct Padded : DescribedModule {
  Padded(const ParamOrigin& origin, const ModuleSpec& spec)
      : weight(add(spec.at("weight"), origin)), bias(add(spec.at("bias"), origin)) {}
  at::Tensor weight, bias;
};

struct Parent : DescribedModule {
  explicit Parent(const ParamOrigin& origin) {
    ModuleSpec spec;
    spec.add_child("inner", padded_params());
    inner = add_child<Padded>(origin, spec, "inner");
  }
  std::shared_ptr<Padded> inner;
};

TEST(DescribedModule, AddCutsFillsDescribesAndRegisters) {
  at::Tensor whole = at::zeros({8, 3}, at::kDouble);
  at::Tensor rows = whole.narrow(0, 0, 5);
  fill_normal(rows, 0.5, 7, "model.inner.weight", {5, 3});
  for (int64_t rank = 0; rank < 4; ++rank) {
    const Parent parent({.options = at::TensorOptions(at::kDouble),
                         .seed = 7,
                         .name = "model.",
                         .place = [=](MeshAxis) {
                           return AxisPlace{rank, 4};
                         }});
    const auto parameters = collect_parameters(parent);
    ASSERT_EQ(parameters.size(), 2u);
    EXPECT_EQ(parameters[0].name, "inner.weight");
    EXPECT_TRUE(at::equal(parameters[0].tensor, whole.narrow(0, 2 * rank, 2))) << rank;
    EXPECT_TRUE(parameters[0].tensor.requires_grad());
    EXPECT_EQ(parameters[0].description.placement(MeshAxis::tp), Placement(Shard{0}));
    EXPECT_EQ(parameters[0].description.unpadded_rows, 5);
    EXPECT_TRUE(parameters[0].cut_by == (AxisSizes{{MeshAxis::tp, 4}}));
    EXPECT_EQ(parameters[1].name, "inner.bias");
    EXPECT_TRUE(at::equal(parameters[1].tensor, at::full({3}, 2.0, at::kDouble)));
    EXPECT_FALSE(parameters[1].description.apply_weight_decay);
    EXPECT_TRUE(parameters[1].cut_by == AxisSizes{});
  }
}

TEST(DescribedModule, WithoutInitializationOnlyConstantValuesAreSet) {
  const Parent parent({.perform_initialization = false});
  EXPECT_TRUE(at::equal(parent.inner->weight, at::zeros({8, 3})));
  EXPECT_TRUE(at::equal(parent.inner->bias, at::full({3}, 2.0)));
}

TEST(DescribedModule, AddNamesTheWholeParameterThatCannotBeCut) {
  try {
    const Parent parent({.name = "model.", .place = [](MeshAxis) { return AxisPlace{0, 3}; }});
    FAIL() << "accepted";
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(),
                 "parameter 'model.inner.weight': dimension 0 has size 8, allowed: a multiple of "
                 "the 3 ranks of tp");
  }
}

TEST(DescribedModule, AChildThatIsNotStatedIsRefused) {
  struct Misspelt : DescribedModule {
    Misspelt() {
      ModuleSpec spec;
      spec.add_child("inner", padded_params());
      add_child<Padded>(ParamOrigin{}, spec, "innner");
    }
  };
  EXPECT_THROW(Misspelt(), UsageError);
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

/// Draws the values element by element.
at::Tensor normals(at::IntArrayRef shape, double standard_deviation, uint64_t seed,
                   std::string_view name) {
  const CounterStream stream(seed, name);
  at::Tensor values = at::empty(shape, at::kDouble);
  for (int64_t i = 0; i < values.numel(); ++i)
    values.mutable_data_ptr<double>()[i] =
        standard_deviation * stream.normal_pair(static_cast<uint64_t>(i) / 2)[i % 2];
  return values;
}

TEST(FillNormal, LargeTensorsHaveTheValuesOfTheirElements) {
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{53, 1001}, {70001}, {3, 30011}, {2, 3, 5003}}) {
    const at::Tensor expected = normals(shape, 0.3, 5, "large");
    for (const int threads : {1, 3}) {
      const int before = at::get_num_threads();
      at::set_num_threads(threads);
      at::Tensor filled = at::empty(shape, at::kDouble), rounded = at::empty(shape, at::kHalf);
      fill_normal(filled, 0.3, 5, "large", shape);
      fill_normal(rounded, 0.3, 5, "large", shape);
      at::set_num_threads(before);
      EXPECT_TRUE(at::equal(filled, expected)) << at::IntArrayRef(shape) << " " << threads;
      EXPECT_TRUE(at::equal(rounded, expected.to(at::kHalf))) << at::IntArrayRef(shape);
    }
  }
}

TEST(FillNormal, FillsStridedTrainedAndEmptyTensors) {
  const at::Tensor expected = normals({130, 90}, 1, 5, "w");
  at::Tensor strided = at::empty({90, 130}, at::kDouble).t();
  fill_normal(strided, 1, 5, "w", {130, 90});
  EXPECT_TRUE(at::equal(strided, expected));
  at::Tensor trained = at::zeros({130, 90}, at::kDouble).set_requires_grad(true);
  fill_normal(trained, 1, 5, "w", {130, 90});
  EXPECT_TRUE(at::equal(trained, expected));
  EXPECT_TRUE(trained.is_leaf());
  at::Tensor one = at::zeros({}, at::kDouble), none = at::zeros({4, 0}, at::kDouble);
  fill_normal(one, 1, 5, "w", {});
  fill_normal(none, 1, 5, "w", {4, 0});
  EXPECT_EQ(one.item<double>(), expected[0][0].item<double>());
}

TEST(FillNormal, WrongRankIsRefused) {
  at::Tensor tensor = at::empty({2, 2});
  EXPECT_THROW(fill_normal(tensor, 1, 1, "w", {4}), UsageError);
}

}  // namespace
}  // namespace lockstep
