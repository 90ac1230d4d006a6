#include "lockstep/core/placement.h"

#include <gtest/gtest.h>

#include <string>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

TEST(Placement, IsWrittenAsPyTorchWritesIt) {
  EXPECT_EQ(to_string(Placement(Shard{-1})), "Shard(-1)");
  EXPECT_EQ(to_string(Placement(Partial{})), "Partial(sum)");
  EXPECT_EQ(to_string(Placement(Partial{ReduceOp::average})), "Partial(avg)");
  EXPECT_EQ(to_string(std::vector<Placement>{Shard{0}, Replicate{}, Partial{ReduceOp::max}}),
            "(Shard(0), Replicate, Partial(max))");
  EXPECT_EQ(to_string(std::vector<Placement>{}), "()");
}

TEST(Placement, PartialMeansASumUnlessItSaysOtherwise) {
  EXPECT_EQ(Placement(Partial{}), Placement(Partial{ReduceOp::sum}));
  EXPECT_NE(Placement(Partial{}), Placement(Partial{ReduceOp::min}));
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
  norm.is_embedding_or_output = true;
  EXPECT_EQ(norm.placement(MeshAxis::tp), Placement(Replicate{}));
  EXPECT_EQ(norm.to_string(),
            "dense, partial-sum over tp, partial-sum over cp, partial-sum over dp, embedding or "
            "output layer, no weight decay");
}

TEST(ParamDescription, ItsAxesAreThoseOfOneGrid) {
  using enum MeshAxis;
  const ParamDescription dense, expert{.is_expert = true};
  EXPECT_EQ(dense.axes(), (std::array{tp, cp, dp, pp}));
  EXPECT_EQ(expert.axes(), (std::array{etp, ep, edp, pp}));
  for (const MeshAxis axis : {tp, cp, dp, pp, etp, ep, edp}) {
    EXPECT_EQ(dense.lives_on(axis), axis == tp || axis == cp || axis == dp || axis == pp);
    EXPECT_EQ(expert.lives_on(axis), axis == etp || axis == ep || axis == edp || axis == pp);
    EXPECT_EQ(splits_batch(axis), axis == cp || axis == dp || axis == edp);
  }
}

TEST(ParamDescription, OneStageHoldsItUnlessItSaysOtherwise) {
  const ParamDescription own;
  EXPECT_FALSE(own.is_on_all_stages());
  EXPECT_FALSE(own.is_on_several_stages());
  const ParamDescription everywhere{.stages = StageCopies::all};
  EXPECT_TRUE(everywhere.is_on_all_stages());
  EXPECT_TRUE(everywhere.is_on_several_stages());
  EXPECT_EQ(everywhere.to_string(),
            "dense, partial-sum over cp, partial-sum over dp, on all stages");
  for (const GradientState state : {GradientState::partial_sum, GradientState::partial_mean}) {
    ParamDescription terms{.gradient_states = {{MeshAxis::pp, state}}};
    EXPECT_TRUE(terms.is_on_all_stages());
    EXPECT_TRUE(terms.is_on_several_stages());
    const std::string text = terms.to_string();
    terms.stages = StageCopies::all;  // repeats it
    EXPECT_EQ(terms.to_string(), text);
    EXPECT_NO_THROW(terms.validate("w"));
  }
  const ParamDescription whole{.gradient_states = {{MeshAxis::pp, GradientState::complete}}};
  EXPECT_FALSE(whole.is_on_all_stages());
}

TEST(ParamDescription, TheUpdateIsPartOfIt) {
  const ParamDescription matrix{.update = ParamUpdate::matrix};
  EXPECT_EQ(ParamDescription().update, ParamUpdate::elementwise);
  EXPECT_EQ(matrix.to_string(),
            "dense, partial-sum over cp, partial-sum over dp, updated as a matrix");
}

TEST(ParamDescription, MatricesInOneParameterArePartOfIt) {
  ParamDescription qkv;
  qkv.rows_of_matrices = {8, 4, 4};
  qkv.validate("qkv");
  EXPECT_EQ(qkv.to_string(),
            "dense, partial-sum over cp, partial-sum over dp, blocks of 8 + 4 + 4 rows");
  qkv.rows_of_matrices = {8, 0};
  try {
    qkv.validate("qkv");
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(),
                 "parameter 'qkv': found blocks of 8 + 0 rows, allowed: >= 1 of each");
  }
}

TEST(ParamDescription, ATieIsPartOfIt) {
  ParamDescription embedding;
  EXPECT_FALSE(embedding.is_on_several_stages());
  embedding.tie = Tie{"word_embeddings"};
  EXPECT_TRUE(embedding.is_on_several_stages());
  EXPECT_FALSE(embedding.is_on_all_stages());
  EXPECT_EQ(embedding.to_string(),
            "dense, partial-sum over cp, partial-sum over dp, tied 'word_embeddings' on the first "
            "and the last stage");
  embedding.tie = Tie{"position_embeddings", TiedStages::first};
  EXPECT_TRUE(embedding.is_on_several_stages());
}

TEST(ParamDescription, ContradictionsAreRefusedByName) {
  const auto refusal = [](const ParamDescription& description) -> std::string {
    try {
      description.validate("w");
      return "";
    } catch (const UsageError& error) {
      return error.what();
    }
  };
  using enum MeshAxis;
  constexpr auto kSum = GradientState::partial_sum;
  EXPECT_EQ(refusal({}), "");
  for (const MeshAxis axis : {cp, dp, edp, pp}) {
    EXPECT_EQ(refusal({.placements = {{axis, Shard{1}}}, .is_expert = axis == edp}),
              std::string("parameter 'w': found Shard(1) over ") + to_string(axis) +
                  ", allowed: Replicate; only tp, etp and ep cut parameters");
    EXPECT_EQ(refusal({.placements = {{axis, Replicate{}}}, .is_expert = axis == edp}), "");
  }
  EXPECT_EQ(refusal({.placements = {{tp, Shard{0}}}}), "");
  for (const MeshAxis axis : {etp, ep})
    EXPECT_EQ(refusal({.placements = {{axis, Shard{0}}}, .is_expert = true}), "");
  EXPECT_EQ(refusal({.gradient_states = {{tp, kSum}}, .tie = Tie{"e"}}), "");
  EXPECT_EQ(refusal({.gradient_states = {{ep, kSum}}}),
            "parameter 'w': found a description over ep, allowed: tp, cp, dp, pp (no expert)");
  EXPECT_EQ(refusal({.placements = {{tp, Shard{0}}}, .is_expert = true}),
            "parameter 'w': found a description over tp, allowed: etp, ep, edp, pp (an expert)");
  EXPECT_EQ(refusal({.placements = {{tp, Partial{}}}}),
            "parameter 'w': found Partial(sum) over tp, allowed: Replicate, Shard");
  EXPECT_EQ(refusal({.placements = {{tp, Shard{1}}}, .gradient_states = {{tp, kSum}}}),
            "parameter 'w': found Shard(1) over tp with a gradient that is partial-sum there, "
            "allowed: complete");
  EXPECT_EQ(refusal({.tie = Tie{}}), "parameter 'w': found a tie without a name");
  EXPECT_EQ(refusal({.gradient_states = {{pp, kSum}}, .tie = Tie{"e"}}),
            "parameter 'w': found a tie, 'e', and a gradient that is partial-sum over pp, allowed: "
            "one of the two");
  EXPECT_EQ(refusal({.stages = StageCopies::all, .tie = Tie{"e"}}),
            "parameter 'w': found a tie, 'e', and copies on all stages, allowed: one of the two");
}

}  // namespace
}  // namespace lockstep
