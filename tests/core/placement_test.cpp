#include "lockstep/core/placement.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(Placement, IsWrittenAsPyTorchWritesIt) {
  EXPECT_EQ(to_string(Placement(Shard{-1})), "Shard(-1)");
  EXPECT_EQ(to_string(Placement(Partial{})), "Partial(sum)");
  EXPECT_EQ(to_string(Placement(Partial{PartialOp::avg})), "Partial(avg)");
  EXPECT_EQ(to_string(std::vector<Placement>{Shard{0}, Replicate{}, Partial{PartialOp::max}}),
            "(Shard(0), Replicate, Partial(max))");
  EXPECT_EQ(to_string(std::vector<Placement>{}), "()");
}

TEST(Placement, PartialMeansASumUnlessItSaysOtherwise) {
  EXPECT_EQ(Placement(Partial{}), Placement(Partial{PartialOp::sum}));
  EXPECT_NE(Placement(Partial{}), Placement(Partial{PartialOp::min}));
}

TEST(ParamDescription, DenseGradientsArePartialOverTheAxesThatSplitTheBatch) {
  const ParamDescription dense;
  EXPECT_EQ(dense.gradient_state(MeshAxis::dp), GradientState::partial_sum);
  EXPECT_EQ(dense.gradient_state(MeshAxis::cp), GradientState::partial_sum);
  EXPECT_EQ(dense.gradient_state(MeshAxis::tp), GradientState::complete);
  EXPECT_EQ(dense.gradient_state(MeshAxis::edp), GradientState::complete);
  EXPECT_EQ(dense.to_string(), "dense, partial-sum over cp, partial-sum over dp");
}

TEST(ParamDescription, ExpertsUseTheirOwnAxes) {
  ParamDescription expert;
  expert.is_expert = true;
  expert.placements[MeshAxis::ep] = Shard{0};
  EXPECT_EQ(expert.gradient_state(MeshAxis::edp), GradientState::partial_sum);
  EXPECT_EQ(expert.gradient_state(MeshAxis::dp), GradientState::complete);
  EXPECT_EQ(expert.to_string(), "expert, Shard(0) over ep, partial-sum over edp");
}

TEST(ParamDescription, WhatIsDeclaredOverridesTheDefault) {
  ParamDescription norm;
  norm.gradient_states[MeshAxis::tp] = GradientState::partial_sum;  // sequence parallel
  norm.apply_weight_decay = false;
  EXPECT_EQ(norm.placement(MeshAxis::tp), Placement(Replicate{}));
  EXPECT_EQ(norm.to_string(),
            "dense, partial-sum over tp, partial-sum over cp, partial-sum over dp, no weight "
            "decay");
}

}  // namespace
}  // namespace lockstep
