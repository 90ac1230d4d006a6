#include "lockstep/models/layers/linear.h"

#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/parallel_functions.h"

namespace lockstep {
namespace {

/// This rank's part of a normal matrix of `shape` (over all ranks), cut along `dim`.
at::Tensor initial_part(const LayerContext& context, std::vector<int64_t> shape, size_t dim,
                        double init_std) {
  const ProcessGroup group = context.tensor_parallel();
  require<UsageError>(shape[dim] % group.size() == 0,
                      "{}weight: dimension {} has size {}, allowed: a multiple of the {} ranks of "
                      "tp",
                      context.name, dim, shape[dim], group.size());
  std::vector<int64_t> part = shape, offset(shape.size(), 0);
  part[dim] /= group.size();
  offset[dim] = part[dim] * group.rank();
  at::Tensor weight = at::empty(part, context.options);
  fill_normal(weight, init_std, context.seed, context.name + "weight", shape, offset);
  return weight;
}

ParallelLinearOptions linear_options(const LayerContext& context, LinearInput input) {
  return {.group = context.tensor_parallel(),
          .input = input,
          .deferred = context.deferred,
          .label = context.name.substr(0, context.name.size() - 1)};
}

ParamDescription cut_along(size_t dim) {
  return {.placements = {{MeshAxis::tp, Shard{static_cast<int64_t>(dim)}}}};
}

}  // namespace

LinearInput column_parallel_input(const LayerContext& context) {
  return context.parallel.sequence_parallel ? LinearInput::sequence_chunk : LinearInput::copied;
}

ColumnParallelLinear::ColumnParallelLinear(const LayerContext& context, int64_t in_features,
                                           std::vector<int64_t> out, bool bias, double init_std,
                                           std::vector<int64_t> rows_of_matrices)
    : options_(linear_options(context, column_parallel_input(context))) {
  const size_t dim = out.size() - 1;
  out.push_back(in_features);
  ParamDescription description = cut_along(dim);
  description.rows_of_matrices = std::move(rows_of_matrices);
  weight_ = register_described_parameter("weight", initial_part(context, out, dim, init_std),
                                         description);
  if (!bias) return;
  description.apply_weight_decay = false;
  description.rows_of_matrices.clear();
  std::vector<int64_t> shape = weight_.sizes().vec();
  shape.pop_back();
  bias_ = register_described_parameter("bias", at::zeros(shape, context.options), description);
}

at::Tensor ColumnParallelLinear::forward(const at::Tensor& input) const {
  return parallel_linear(input, weight_, bias_, options_);
}

RowParallelLinear::RowParallelLinear(const LayerContext& context, int64_t in_features,
                                     int64_t out_features, bool bias, double init_std)
    : options_(linear_options(context, LinearInput::own)),
      sequence_parallel_(context.parallel.sequence_parallel) {
  weight_ = register_described_parameter(
      "weight", initial_part(context, {out_features, in_features}, 1, init_std), cut_along(1));
  if (!bias) return;
  bias_ = register_described_parameter(
      "bias", at::zeros({out_features}, context.options),
      {.gradient_states = {{MeshAxis::tp, context.replicated_gradient_state()}},
       .apply_weight_decay = false});
}

at::Tensor RowParallelLinear::forward(const at::Tensor& input) const {
  const bool alone = options_.group.size() == 1;
  const at::Tensor term = parallel_linear(input, weight_, alone ? bias_ : at::Tensor(), options_);
  if (alone) return term;
  const std::string label = options_.label + " output";
  const at::Tensor sum = sequence_parallel_
                             ? reduce_scatter_to_group(term, options_.group, 0, label)
                             : reduce_from_group(term, options_.group, label);
  return bias_.defined() ? sum + bias_ : sum;
}

double output_layer_init_std(const TransformerConfig& config) {
  return config.init_method_std / std::sqrt(2.0 * static_cast<double>(config.num_layers));
}

}  // namespace lockstep
