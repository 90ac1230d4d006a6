#include "lockstep/models/linear.h"

#include <utility>

#include <ATen/ATen.h>

#include "lockstep/models/fp8_scaling.h"
#include "lockstep/models/layer_params.h"
#include "lockstep/models/low_rank_adapter.h"

namespace lockstep {
namespace {

ParallelLinearOptions linear_options(const ParallelContext& context, LinearInput input,
                                     LinearOutput output = LinearOutput::own) {
  return {.group = context.tensor_parallel(),
          .input = input,
          .output = output,
          .overlap = context.tp_comm_overlap,
          .deferred = context.deferred,
          .label = context.label()};
}

/// The layer that multiplies in 8-bit floats; null if the context does not ask for it.
std::shared_ptr<const Fp8Layer> fp8_layer(const ParallelContext& context,
                                          const at::Tensor& weight) {
  return context.fp8 ? context.fp8->add_layer(context.name + "weight", weight) : nullptr;
}

/// Always initializes: the weights that are loaded may be those of a model without adapters.
ParamOrigin adapter_origin(const ParallelContext& context) {
  ParamOrigin origin = context.origin();
  origin.perform_initialization = true;
  return origin;
}

}  // namespace

LinearInput column_parallel_input(const ParallelContext& context) {
  return context.sequence_parallel ? LinearInput::sequence_chunk : LinearInput::copied;
}

LinearOutput row_parallel_output(const ParallelContext& context) {
  return context.sequence_parallel ? LinearOutput::sequence_chunk : LinearOutput::summed;
}

ColumnParallelLinear::ColumnParallelLinear(const ParallelContext& context, const ModuleSpec& spec)
    : options_(linear_options(context, column_parallel_input(context))) {
  weight_ = add(spec.at("weight"), context.origin());
  options_.fp8 = fp8_layer(context, weight_);
  if (const ParamSpec* bias = spec.find("bias")) bias_ = add(*bias, context.origin());
  if (spec.find("lora_A") == nullptr) return;
  const at::Tensor a = add(spec.at("lora_A"), adapter_origin(context));
  const at::Tensor b = add(spec.at("lora_B"), adapter_origin(context));
  adapter_ = std::make_shared<LowRankAdapter>(context, a, b, LowRankAdapter::Beside::columns);
}

ColumnParallelLinear::ColumnParallelLinear(const ParallelContext& context, int64_t in_features,
                                           std::vector<int64_t> out, bool bias, double init_std,
                                           std::vector<int64_t> rows_of_matrices)
    : ColumnParallelLinear(
          context, column_parallel_linear_params(in_features, std::move(out), bias, init_std,
                                                 std::move(rows_of_matrices))) {}

ColumnParallelLinear::ColumnParallelLinear(const ParallelContext& context, int64_t in_features,
                                           int64_t out_features, bool bias, double init_std)
    : ColumnParallelLinear(context, in_features, std::vector<int64_t>{out_features}, bias,
                           init_std) {}

at::Tensor ColumnParallelLinear::forward(const at::Tensor& input,
                                         const TokenPositions& tokens) const {
  const at::Tensor output = parallel_linear(input, weight_, bias_, options_);
  return adapter_ ? output + adapter_->forward(input, tokens, is_training()) : output;
}

RowParallelLinear::RowParallelLinear(const ParallelContext& context, const ModuleSpec& spec)
    : options_(linear_options(context, LinearInput::own, row_parallel_output(context))) {
  weight_ = add(spec.at("weight"), context.origin());
  options_.fp8 = fp8_layer(context, weight_);
  if (const ParamSpec* bias = spec.find("bias")) bias_ = add(*bias, context.origin());
  if (spec.find("lora_A") == nullptr) return;
  const at::Tensor a = add(spec.at("lora_A"), adapter_origin(context));
  const at::Tensor b = add(spec.at("lora_B"), adapter_origin(context));
  adapter_ = std::make_shared<LowRankAdapter>(context, a, b, LowRankAdapter::Beside::rows);
}

RowParallelLinear::RowParallelLinear(const ParallelContext& context, int64_t in_features,
                                     int64_t out_features, bool bias, double init_std)
    : RowParallelLinear(context,
                        row_parallel_linear_params(context.replicated_gradient_state(), in_features,
                                                   out_features, bias, init_std)) {}

at::Tensor RowParallelLinear::forward(const at::Tensor& input, const TokenPositions& tokens) const {
  const at::Tensor output = parallel_linear(input, weight_, bias_, options_);
  return adapter_ ? output + adapter_->forward(input, tokens, is_training()) : output;
}

ReplicatedLinear::ReplicatedLinear(const ParallelContext& context, const ModuleSpec& spec)
    : options_(linear_options(context, LinearInput::own)) {
  weight_ = add(spec.at("weight"), context.origin());
  options_.fp8 = fp8_layer(context, weight_);
}

at::Tensor ReplicatedLinear::forward(const at::Tensor& input) const {
  return parallel_linear(input, weight_, {}, options_);
}

}  // namespace lockstep
