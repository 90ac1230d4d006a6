#include "lockstep/models/rotary_embedding.h"

#include <cmath>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// packed -> query, key, value
struct RotaryFunction : torch::autograd::Function<RotaryFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& packed,
                               const kernels::RotaryTable& table,
                               const kernels::QueryRange& queries) {
    context->save_for_backward({table.cos, table.sin, table.positions});
    context->saved_data["first"] = queries.first;
    context->saved_data["count"] = queries.count;
    context->saved_data["heads"] = packed.size(3) - 2;
    const kernels::AttentionHeads heads = kernels::rotate_heads(packed, table, queries);
    return {heads.query, heads.key, heads.value};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require<UsageError>(!at::GradMode::is_enabled(),
                        "rotary embedding: found backward with create_graph, allowed: without; "
                        "there is no second derivative");
    const variable_list saved = context->get_saved_variables();
    return {kernels::rotate_heads_backward(
                {grads[0], grads[1], grads[2]}, {saved[0], saved[1], saved[2]},
                {context->saved_data["first"].toInt(), context->saved_data["count"].toInt()},
                context->saved_data["heads"].toInt()),
            {},
            {}};
  }
};

}  // namespace

at::Tensor rotary_frequencies(const TransformerConfig& config, int64_t rotated) {
  const at::Tensor plain = at::pow(config.rotary_base, at::arange(0, rotated, 2, at::kDouble) *
                                                           (-1.0 / static_cast<double>(rotated)));
  const double factor = config.rope_scaling_factor;
  switch (config.rope_scaling_type) {
    case RopeScaling::none:
      return plain;
    case RopeScaling::linear:
      return plain / factor;
    case RopeScaling::llama3:
      break;
  }
  const double low = config.rope_low_freq_factor, high = config.rope_high_freq_factor;
  const auto context = static_cast<double>(config.rope_original_max_position_embeddings);
  const at::Tensor waves = plain * (context / (2 * M_PI));
  const at::Tensor kept = ((waves - low) / (high - low)).clamp(0, 1);
  return plain * (kept + (1 - kept) / factor);
}

RotaryEmbedding::RotaryEmbedding(const LayerContext& context) {
  const auto rotated = static_cast<int64_t>(static_cast<double>(*context.config.kv_channels) *
                                            context.config.rotary_percent);
  const at::Tensor angles = at::outer(at::arange(context.config.seq_length, at::kDouble),
                                      rotary_frequencies(context.config, rotated));
  const bool wide = c10::typeMetaToScalarType(context.options.dtype()) == at::kDouble;
  const auto options = context.options.dtype(wide ? at::kDouble : at::kFloat);
  cos_ = angles.cos().to(options);
  sin_ = angles.sin().to(options);
}

kernels::AttentionHeads RotaryEmbedding::heads_of(const at::Tensor& packed,
                                                  const kernels::QueryRange& queries,
                                                  const at::Tensor& positions) const {
  const at::Tensor placed = positions.defined() ? positions.to(packed.device()) : positions;
  const variable_list heads =
      RotaryFunction::apply(packed, kernels::RotaryTable{cos_, sin_, placed}, queries);
  return {heads[0], heads[1], heads[2]};
}

}  // namespace lockstep
