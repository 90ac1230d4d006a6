#include "lockstep/models/rotary_embedding.h"

#include <cmath>

#include <ATen/ATen.h>

namespace lockstep {

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

RotaryEmbedding::RotaryEmbedding(const LayerContext& context)
    : rotated_(static_cast<int64_t>(static_cast<double>(*context.config.kv_channels) *
                                    context.config.rotary_percent)) {
  const at::Tensor angles = at::outer(at::arange(context.config.seq_length, at::kDouble),
                                      rotary_frequencies(context.config, rotated_));
  const at::Tensor cos = angles.cos(), sin = angles.sin();
  const auto table = [&](const at::Tensor& first, const at::Tensor& second) {
    return at::cat({first, second}, 1).unsqueeze(1).unsqueeze(1).to(context.options);
  };
  cos_ = table(cos, cos);
  sin_ = table(-sin, sin);
}

at::Tensor RotaryEmbedding::rows(const at::Tensor& table, const at::Tensor& heads,
                                 const at::Tensor& positions) const {
  if (!positions.defined()) return table.slice(0, 0, heads.size(0)).to(heads.options());
  return table.index_select(0, positions.to(table.device())).to(heads.options());
}

at::Tensor RotaryEmbedding::apply(const at::Tensor& heads, const at::Tensor& positions) const {
  const int64_t channels = heads.size(3);
  const at::Tensor cos = rows(cos_, heads, positions);
  const at::Tensor sin = rows(sin_, heads, positions);
  const at::Tensor turned = rotated_ == channels ? heads : heads.slice(3, 0, rotated_);
  const at::Tensor swapped =
      at::cat({turned.slice(3, rotated_ / 2), turned.slice(3, 0, rotated_ / 2)}, 3);
  const at::Tensor result = at::addcmul(turned * cos, swapped, sin);
  return rotated_ == channels ? result : at::cat({result, heads.slice(3, rotated_)}, 3);
}

}  // namespace lockstep
