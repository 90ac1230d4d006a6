#include "lockstep/models/latent_heads.h"

#include <cmath>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/attention_rules.h"
#include "lockstep/core/check.h"
#include "lockstep/models/rotary_embedding.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct LatentSizes : torch::CustomClassHolder {
  explicit LatentSizes(const LatentHeadSizes& s) : sizes(s) {}
  LatentHeadSizes sizes;
};

/// The rows of a table for the tokens: [sequence, 1 or batch, 1, rotated / 2].
at::Tensor rows_of_tokens(const at::Tensor& table, const at::Tensor& positions, int64_t sequence) {
  if (!positions.defined()) return table.narrow(0, 0, sequence).unsqueeze(1).unsqueeze(1);
  const int64_t samples = positions.dim() == 2 ? positions.size(1) : 1;
  return table.index_select(0, positions.flatten()).view({sequence, samples, 1, -1});
}

/// Rotates the channel pairs (i, i + half) of `x` [sequence, batch, heads, 2 half]; the result has
/// the dtype of the tables.
at::Tensor turned(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  const auto halves = x.to(cos.scalar_type()).chunk(2, -1);
  return at::cat({halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin}, -1);
}

at::Tensor scaled(const at::Tensor& x, double scale, at::ScalarType wide) {
  return scale == 1 ? x : x.to(wide) * scale;
}

/// (query, key and value, shared key channels) -> query, key, value
struct LatentHeadsFunction : torch::autograd::Function<LatentHeadsFunction> {
  static variable_list forward(AutogradContext* context, const at::Tensor& query,
                               const at::Tensor& key_value, const at::Tensor& shared_key,
                               const at::Tensor& cos_table, const at::Tensor& sin_table,
                               const std::optional<at::Tensor>& positions,
                               const c10::intrusive_ptr<LatentSizes>& held) {
    const auto& [fixed, rotated, value, width, scale] = held->sizes;
    const int64_t sequence = query.size(0), batch = query.size(1);
    const int64_t heads = query.size(2) / (fixed + rotated);
    const at::Tensor places = positions.value_or(at::Tensor());
    context->save_for_backward({cos_table, sin_table, places});
    context->saved_data["sizes"] = c10::IValue::make_capsule(held);
    const at::Tensor cos = rows_of_tokens(cos_table, places, sequence);
    const at::Tensor sin = rows_of_tokens(sin_table, places, sequence);

    const auto heads_of = [&](const at::Tensor& x) {
      return x.unflatten(2, {heads, x.size(2) / heads});
    };
    const auto made = [&](int64_t filled) {
      at::Tensor x = at::empty({sequence, batch, heads, width}, query.options());
      x.narrow(3, filled, width - filled).zero_();
      return x;
    };
    const at::Tensor queries = heads_of(query), keys_values = heads_of(key_value);
    at::Tensor q = made(fixed + rotated), k = made(fixed + rotated), v = made(value);
    q.narrow(3, 0, fixed).copy_(scaled(queries.narrow(3, 0, fixed), scale, cos.scalar_type()));
    q.narrow(3, fixed, rotated)
        .copy_(turned(queries.narrow(3, fixed, rotated), cos * scale, sin * scale));
    k.narrow(3, 0, fixed).copy_(keys_values.narrow(3, 0, fixed));
    k.narrow(3, fixed, rotated).copy_(turned(shared_key.unsqueeze(2), cos, sin));
    v.narrow(3, 0, value).copy_(keys_values.narrow(3, fixed, value));
    return {q, k, v};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    require<UsageError>(!at::GradMode::is_enabled(),
                        "latent attention: found backward with create_graph, allowed: without; "
                        "there is no second derivative");
    const auto capsule = context->saved_data["sizes"].toCapsule();
    const auto& [fixed, rotated, value, width, scale] =
        static_cast<const LatentSizes&>(*capsule).sizes;
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &of_query = grads[0], &of_key = grads[1], &of_value = grads[2];
    const int64_t sequence = of_query.size(0);
    const at::Tensor cos = rows_of_tokens(saved[0], saved[2], sequence);
    const at::Tensor back = rows_of_tokens(saved[1], saved[2], sequence).neg();
    const auto wide = cos.scalar_type(), narrow = of_query.scalar_type();

    const at::Tensor query =
        at::cat({scaled(of_query.narrow(3, 0, fixed), scale, wide).to(narrow),
                 turned(of_query.narrow(3, fixed, rotated), cos * scale, back * scale).to(narrow)},
                3);
    const at::Tensor key_value =
        at::cat({of_key.narrow(3, 0, fixed), of_value.narrow(3, 0, value)}, 3);
    const at::Tensor shared =
        turned(of_key.narrow(3, fixed, rotated).sum(2, /*keepdim=*/true, wide), cos, back);
    return {query.flatten(2), key_value.flatten(2), shared.squeeze(2).to(narrow), {}, {}, {}, {}};
  }
};

}  // namespace

LatentHeads::LatentHeads(const LayerContext& context) {
  const TransformerConfig& config = context.config;
  const auto tables = rotary_of(context);
  cos_ = tables->cosines();
  sin_ = tables->sines();
  const int64_t width = latent_head_channels(config);
  const double wider =
      static_cast<double>(width) / static_cast<double>(latent_query_channels(config));
  sizes_ = {.fixed = config.qk_head_dim,
            .rotated = config.qk_pos_emb_head_dim,
            .value = config.v_head_dim,
            .width = width,
            .scale = attention_logit_factor(config) * std::sqrt(wider)};
}

std::vector<at::Tensor> LatentHeads::forward(const at::Tensor& query, const at::Tensor& key_value,
                                             const at::Tensor& shared_key,
                                             const at::Tensor& positions) const {
  require<UsageError>(
      positions.defined() || query.size(0) <= cos_.size(0),
      "latent attention: found a sequence of {}, allowed: {} positions of the table", query.size(0),
      cos_.size(0));
  const auto placed =
      positions.defined() ? std::optional(positions.to(query.device())) : std::nullopt;
  return LatentHeadsFunction::apply(query, key_value, shared_key, cos_, sin_, placed,
                                    c10::make_intrusive<LatentSizes>(sizes_));
}

}  // namespace lockstep
