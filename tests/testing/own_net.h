#pragma once

#include <memory>
#include <string>
#include <vector>

#include <torch/nn/modules/linear.h>

#include "lockstep/lockstep.h"
#include "lockstep/testing/testing.h"

/// A user's own model, and mistakes that users make in one.
namespace own_net {

/// The mistake. Mistakes inside of a block are in block 1.
enum class Mistake {
  none,
  missing_all_reduce,      ///< the row-parallel product is not reduced
  missing_copy_to_group,   ///< the gradient of the norm's output is not reduced
  norm_declared_complete,  ///< although it sees only a part of the tokens
  norm_declared_partial,   ///< although it sees all tokens
  norm_declared_mean,      ///< although its terms belong to a sum
  copies_not_tied,         ///< the tables of the first and the last stage
  tie_lacks_a_stage,       ///< copies are promised on all stages, but only two have them
  mean_loss,               ///< the mean over the rank's tokens
  bias_on_every_rank,      ///< added before the terms are reduced
  router_not_described,    ///< with sequence parallelism
  used_through_a_view,     ///< a view of the table, made with the model
  dropout_by_rank,         ///< different masks on the same activations
  wrong_shard_dimension,   ///< not the one that the weight's shape shows
  wrong_order_of_pieces,   ///< two matrices in one parameter, sharded as one
  forgotten_finalize,
};

constexpr int64_t kTokens = 11, kWidth = 8, kInner = 12, kLength = 12, kSamples = 4, kBlocks = 4;

/// A norm, a gated network between two tensor-parallel products, a router that weights the output,
/// and dropout.
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

/// The blocks of this pipeline stage. The first and the last stage also have a table that embeds
/// tokens and scores them.
class Net : public lockstep::DescribedModule {
 public:
  Net(const lockstep::ParallelContext& context, Mistake mistake);
  /// Returns the input of the next stage, or the loss of this rank's samples.
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

/// A Net without mistakes, as the checks take it.
inline std::shared_ptr<Net> make_net(const lockstep::ParallelContext& context) {
  return std::make_shared<Net>(context, Mistake::none);
}
inline at::Tensor loss_of_net(Net& net, const lockstep::testing::StageInput& input) {
  return net.forward(input);
}

/// A mistake, where it shows, and the expected finding of the check.
struct Case {
  std::string name;
  Mistake mistake;
  lockstep::testing::RankLayout layout;
  std::string parameter;
  std::string text;  ///< a part of the finding
};
std::vector<Case> mistakes();

lockstep::testing::LayoutReport check(Mistake mistake,
                                      const std::vector<lockstep::testing::RankLayout>& layouts);

/// Layouts for a model without mistakes: tp, sp, dp, pp and all of them.
std::vector<lockstep::testing::RankLayout> good_layouts();

}  // namespace own_net
