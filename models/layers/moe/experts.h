#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/core/parameters.h"
#include "lockstep/models/layers/layer_context.h"

namespace lockstep {

/// One of the experts' two weights, of all experts of this rank. Parameter: `weight`, over all
/// ranks [num_experts, out..., in], cut over ep along the experts and over etp along the last
/// dimension of `out` or along `in`.
class ExpertWeight : public DescribedModule {
 public:
  enum class Cut { out, in };

  /// The dimension that is cut must divide by the ranks of etp, num_experts by those of ep
  /// (UsageError). Starts as normal values of standard deviation `init_std`.
  ExpertWeight(const LayerContext& context, std::vector<int64_t> out, int64_t in, Cut cut,
               double init_std);

  /// This rank's experts: [experts, out, in], the dimensions `out` taken together.
  at::Tensor matrices() const { return weight_.flatten(1, -2); }

 private:
  at::Tensor weight_;
};

/// The feed-forward networks of this rank's experts. Children: `linear_fc1` with weight
/// [num_experts, width, hidden_size], with SwiGLU [num_experts, 2, width, hidden_size], the gate
/// first, and `linear_fc2` with weight [num_experts, hidden_size, width].
class GroupedMLP : public DescribedModule {
 public:
  explicit GroupedMLP(const LayerContext& context);

  /// `tokens` [rows, hidden_size], rows[e] of them for this rank's expert e, expert by expert ->
  /// the same shape: this rank's term of a sum over etp.
  at::Tensor forward(const at::Tensor& tokens, const std::vector<int64_t>& rows) const;

 private:
  Activation activation_;
  std::shared_ptr<ExpertWeight> linear_fc1_;
  std::shared_ptr<ExpertWeight> linear_fc2_;
};

}  // namespace lockstep
