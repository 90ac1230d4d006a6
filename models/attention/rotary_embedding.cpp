#include "lockstep/models/rotary_embedding.h"

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/attention_rules.h"
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

at::Tensor llama3_frequencies(const TransformerConfig& config, const at::Tensor& plain) {
  const double low = config.rope_low_freq_factor, high = config.rope_high_freq_factor;
  const auto context = static_cast<double>(config.rope_original_max_position_embeddings);
  const at::Tensor waves = plain * (context / (2 * M_PI));
  const at::Tensor kept = ((waves - low) / (high - low)).clamp(0, 1);
  return plain * (kept + (1 - kept) / config.rope_scaling_factor);
}

at::Tensor yarn_frequencies(const TransformerConfig& config, const at::Tensor& plain) {
  const auto channels = static_cast<double>(2 * plain.numel());
  const auto context = static_cast<double>(config.rope_original_max_position_embeddings);
  const auto pair_with_turns = [&](double turns) {
    return channels * std::log(context / (turns * 2 * M_PI)) / (2 * std::log(config.rotary_base));
  };
  const double low = std::max(std::floor(pair_with_turns(config.rope_beta_fast)), 0.0);
  double high = std::min(std::ceil(pair_with_turns(config.rope_beta_slow)), channels - 1);
  if (low == high) high += 0.001;
  const at::Tensor stretched =
      ((at::arange(plain.numel(), at::kDouble) - low) / (high - low)).clamp(0, 1);
  return plain * (1 - stretched + stretched / config.rope_scaling_factor);
}

}  // namespace

at::Tensor rotary_frequencies(const TransformerConfig& config, int64_t rotated) {
  const at::Tensor plain = at::pow(config.rotary_base, at::arange(0, rotated, 2, at::kDouble) *
                                                           (-1.0 / static_cast<double>(rotated)));
  switch (config.rope_scaling_type) {
    case RopeScaling::none:
      return plain;
    case RopeScaling::linear:
      return plain / config.rope_scaling_factor;
    case RopeScaling::llama3:
      return llama3_frequencies(config, plain);
    case RopeScaling::yarn:
      return yarn_frequencies(config, plain);
  }
  fail<UsageError>("rotary_frequencies: unknown rope_scaling_type");
}

RotaryEmbedding::RotaryEmbedding(const LayerContext& context) {
  const TransformerConfig& config = context.config;
  const at::Tensor angles = at::outer(at::arange(config.seq_length, at::kDouble),
                                      rotary_frequencies(config, rotated_channels(config)));
  const bool wide = c10::typeMetaToScalarType(context.options.dtype()) == at::kDouble;
  const auto options = context.options.dtype(wide ? at::kDouble : at::kFloat);
  const double amplitude = rotary_amplitude(config);
  cos_ = (angles.cos() * amplitude).to(options);
  sin_ = (angles.sin() * amplitude).to(options);
}

std::shared_ptr<const RotaryEmbedding> rotary_of(const LayerContext& context) {
  return context.rotary ? context.rotary : std::make_shared<const RotaryEmbedding>(context);
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
