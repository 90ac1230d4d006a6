#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/core/parameters.h"
#include "lockstep/models/grouped_linear.h"
#include "lockstep/models/layer_context.h"

namespace lockstep {

/// One of the experts' two linear layers, for all experts of this rank. Parameters: `weight`, over
/// all ranks [num_experts, out..., in], cut over ep along the experts and over etp along the last
/// dimension of `out` or along `in`; with model.add_bias_linear `bias` [num_experts, out...], cut
/// likewise, or on every rank of etp.
class ExpertLinear : public DescribedModule {
 public:
  using Cut = ExpertCut;

  /// `spec` as expert_linear_params() returns it.
  ExpertLinear(const LayerContext& context, const ModuleSpec& spec);

  /// The dimension that is cut must be divisible by the ranks of etp, num_experts by those of ep
  /// (UsageError). The weight starts as normal values of standard deviation `init_std`, the bias as
  /// zero.
  ExpertLinear(const LayerContext& context, std::vector<int64_t> out, int64_t in, Cut cut,
               double init_std);

  /// x W_e^T (+ b_e) of the rows of each of this rank's experts, as in grouped_linear(): [rows,
  /// out]. If `in` is cut, this rank's term of a sum over etp, to which the first rank adds the
  /// bias.
  at::Tensor forward(const at::Tensor& x, const RowGroupsPtr& groups) const;

 private:
  at::Tensor weight_;
  at::Tensor bias_;
  std::shared_ptr<const Fp8Layer> fp8_;  ///< null: products in the dtype of the weight
  bool adds_bias_ = true;
};

/// The feed-forward networks of this rank's experts. Children: `linear_fc1` with weight
/// [num_experts, width, hidden_size], with SwiGLU [num_experts, 2, width, hidden_size], the gate
/// first, and `linear_fc2` with weight [num_experts, hidden_size, width].
class GroupedMLP : public DescribedModule {
 public:
  explicit GroupedMLP(const LayerContext& context);
  /// `spec` as grouped_mlp_params() returns it.
  GroupedMLP(const LayerContext& context, const ModuleSpec& spec);

  /// `tokens` [rows, hidden_size], where `groups` says which rows each of this rank's experts has
  /// -> the same shape: this rank's term of a sum over etp.
  at::Tensor forward(const at::Tensor& tokens, const RowGroupsPtr& groups) const;

 private:
  Activation activation_;
  std::shared_ptr<ExpertLinear> linear_fc1_;
  std::shared_ptr<ExpertLinear> linear_fc2_;
};

}  // namespace lockstep
