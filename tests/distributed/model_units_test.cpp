// Which parts of a model are gathered together if parameters are sharded, and in which order.

#include "lockstep/distributed/model_units.h"

#include <gtest/gtest.h>

#include "lockstep/distributed/unit_order.h"

namespace lockstep {
namespace {

using Numbers = std::vector<int64_t>;

ModuleTree module(int64_t params, std::vector<ModuleTree> children = {}) {
  return {.numbered = false, .num_params = params, .children = std::move(children)};
}

ModuleTree numbered(int64_t params, std::vector<ModuleTree> children = {}) {
  return {.numbered = true, .num_params = params, .children = std::move(children)};
}

TEST(ModelUnits, LayersEndsAndOwnParametersAreUnits) {
  const ModuleTree layer = numbered(0, {module(1), module(2)});
  // embedding of two tables; decoder of a list and a norm; output layer; the model's own parameter
  const ModuleTree model =
      module(1, {module(0, {module(1), module(1)}),
                 module(0, {module(0, {layer, layer, layer}), module(2)}), module(1)});
  EXPECT_EQ(number_units(model), (Numbers{0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 6}));
}

TEST(ModelUnits, AListOfOneLayerIsAListAndOneInsideOfALayerIsNot) {
  const ModuleTree experts = module(0, {numbered(1), numbered(1)});
  EXPECT_EQ(number_units(module(0, {module(1), module(0, {numbered(1, {experts})})})),
            (Numbers{0, 1, 1, 1}));
  EXPECT_EQ(number_units(module(0, {module(1), module(0, {numbered(2), numbered(2)})})),
            (Numbers{0, 1, 1, 2, 2}));
}

TEST(ModelUnits, WithoutAListEachChildIsAUnit) {
  EXPECT_EQ(number_units(module(0, {module(0, {module(2)}), module(0), module(1)})),
            (Numbers{0, 0, 1}));
  EXPECT_EQ(number_units(module(2)), (Numbers{0, 0}));
  EXPECT_TRUE(number_units(module(0)).empty());
}

TEST(ModelUnits, AreNumberedAnewInTheSameOrder) {
  EXPECT_EQ(renumbered({7, 2, 2, 9, 7}), (Numbers{1, 0, 0, 2, 1}));
  EXPECT_EQ(renumbered({0, 1, 1}), (Numbers{0, 1, 1}));
  EXPECT_TRUE(renumbered({}).empty());
}

TEST(ModelUnits, NumbersAreDigitsAlone) {
  EXPECT_TRUE(is_number("0"));
  EXPECT_TRUE(is_number("127"));
  for (const char* name : {"", "layer0", "1a", "-1", "0 "}) EXPECT_FALSE(is_number(name)) << name;
}

TEST(ModelUnits, PiecesAreUnitsCutIntoBuckets) {
  const std::vector<LayoutParam> params = {
      {.numel = 10}, {.numel = 20}, {.numel = 300}, {.numel = 40}, {.numel = 0}};
  const LayoutOptions options = {.distributed_optimizer = true, .data_parallel_size = 3};
  const auto whole = unit_pieces(params, {7, 7, 8, 8, 7}, options);
  ASSERT_EQ(whole.size(), 2U);
  EXPECT_EQ(whole[0].unit, 8);
  EXPECT_EQ(whole[0].params, (Numbers{2, 3}));
  EXPECT_EQ(whole[1].unit, 7);
  EXPECT_EQ(whole[1].params, (Numbers{0, 1, 4}));

  LayoutOptions cut = options;
  cut.bucket_size = 30;
  const auto pieces = unit_pieces(params, {7, 7, 8, 8, 7}, cut);
  ASSERT_EQ(pieces.size(), 3U);
  EXPECT_EQ(pieces[0].params, Numbers{3});
  EXPECT_EQ(pieces[1].params, Numbers{2});
  EXPECT_EQ(pieces[1].unit, 8);

  const auto buckets = unit_pieces(params, {}, cut);
  ASSERT_EQ(buckets.size(), 3U);
  for (size_t i = 0; i < buckets.size(); ++i) EXPECT_EQ(buckets[i].unit, static_cast<int64_t>(i));
}

TEST(ModelUnits, ATiedParameterIsAPieceOfItsOwn) {
  const std::vector<LayoutParam> params = {{.numel = 10, .shared_embedding = true}, {.numel = 20}};
  const auto pieces =
      unit_pieces(params, {0, 0}, {.distributed_optimizer = true, .data_parallel_size = 2});
  ASSERT_EQ(pieces.size(), 2U);
  EXPECT_EQ(pieces[0].unit, pieces[1].unit);
}

std::vector<int> following(UnitOrder& order, const std::vector<size_t>& used) {
  std::vector<int> next;
  for (const size_t unit : used) {
    const auto after = order.next_after(unit);
    next.push_back(after ? static_cast<int>(*after) : -1);
  }
  return next;
}

TEST(UnitOrder, AStepTellsTheNextOne) {
  UnitOrder order(3);
  EXPECT_EQ(order.first(), 0U);
  EXPECT_EQ(following(order, {0, 1, 2}), (std::vector<int>{1, 2, -1}));  // between steps
  order.begin_step();
  EXPECT_EQ(following(order, {1, 0, 2, 0}), (std::vector<int>{-1, -1, -1, -1}));
  order.end_step();
  EXPECT_EQ(order.first(), 1U);
  order.begin_step();
  EXPECT_EQ(following(order, {1, 0, 2, 0}), (std::vector<int>{0, 2, 0, -1}));
  order.end_step();
}

TEST(UnitOrder, AnotherOrderIsFollowedFromWhereItAgreesAgain) {
  UnitOrder order(4);
  order.begin_step();
  following(order, {0, 1, 2, 3, 2, 1});
  order.end_step();
  order.begin_step();
  EXPECT_EQ(following(order, {1, 3, 0}), (std::vector<int>{2, 2, -1}));
  order.end_step();
  order.begin_step();  // unused: the previous step counts
  order.end_step();
  EXPECT_EQ(order.first(), 1U);
}

}  // namespace
}  // namespace lockstep
