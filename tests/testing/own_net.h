#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/modules/linear.h>

#include "lockstep/lockstep.h"
#include "lockstep/testing/testing.h"

/// A model of a user's own, and what users do wrong in one.
namespace own_net {

/// What is wrong, in block 1 where it is in a block.
enum class Mistake {
  none,
  missing_all_reduce,      ///< the row-parallel product is not added up
  missing_copy_to_group,   ///< the gradient behind the norm is not added up
  norm_declared_complete,  ///< although it sees a part of the tokens
  norm_declared_partial,   ///< although it sees all
  norm_declared_mean,      ///< although its terms are those of a sum
  copies_not_tied,         ///< the tables of the first and of the last stage
  tie_lacks_a_stage,       ///< copies are promised on all stages and are on two
  mean_loss,               ///< over the rank's tokens
  bias_on_every_rank,      ///< before the terms are added up
  router_not_described,    ///< with sequence parallelism
  used_through_a_view,     ///< of the table, made when the model was
  dropout_by_rank,         ///< other masks on the same activations
  wrong_shard_dimension,   ///< of a weight, by its shape
  wrong_order_of_pieces,   ///< two matrices in one parameter, cut as one
  forgotten_finalize,
};

constexpr int64_t kTokens = 11, kWidth = 8, kInner = 12, kLength = 12, kSamples = 4, kBlocks = 4;

/// Norm, a gated network between two tensor-parallel products, a router that weighs what comes out,
/// dropout.
class Block : public lockstep::DescribedModule {
 public:
  Block(const lockstep::ParallelContext& context, Mistake mistake);
  at::Tensor forward(const at::Tensor& hidden, const lockstep::testing::StageInput& input);

 private:
  at::Tensor inner(const at::Tensor& normed) const;
  at::Tensor drop(const at::Tensor& hidden, const lockstep::testing::StageInput& input) const;

  lockstep::ParallelContext context_;
  lockstep::ProcessGroup tp_;
  Mistake mistake_;
  at::Tensor norm_, in_, in_bias_, out_, out_bias_;
  torch::nn::Linear router_ = nullptr;
};

/// The blocks of this pipeline stage, and on the first and the last one a table that embeds tokens
/// and scores them.
class Net : public lockstep::DescribedModule {
 public:
  Net(const lockstep::ParallelContext& context, Mistake mistake);
  /// What the next stage takes, or the loss of this rank's samples.
  at::Tensor forward(const lockstep::testing::StageInput& input);

 private:
  at::Tensor loss(const at::Tensor& hidden, const at::Tensor& labels) const;

  lockstep::ParallelContext context_;
  lockstep::ProcessGroup tp_;
  Mistake mistake_;
  bool is_first_, is_last_;
  at::Tensor table_, table_view_;
  std::vector<std::shared_ptr<Block>> blocks_;
};

/// A mistake, where it shows, and what the check must say.
struct Case {
  std::string name;
  Mistake mistake;
  lockstep::testing::RankLayout layout;
  std::string parameter;
  std::string text;  ///< a part of what it says
};
std::vector<Case> mistakes();

lockstep::testing::LayoutReport check(Mistake mistake,
                                      const std::vector<lockstep::testing::RankLayout>& layouts);

/// For a model without mistakes: tp, sp, dp, pp and all of them.
std::vector<lockstep::testing::RankLayout> good_layouts();

}  // namespace own_net
