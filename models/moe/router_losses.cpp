#include "lockstep/models/router_losses.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Scale : torch::CustomClassHolder {
  explicit Scale(std::shared_ptr<const TokenLossScale> s) : scale(std::move(s)) {}
  std::shared_ptr<const TokenLossScale> scale;
};

struct AttachLoss : torch::autograd::Function<AttachLoss> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& loss,
                            const std::shared_ptr<const TokenLossScale>& scale) {
    context->saved_data["scale"] = c10::IValue::make_capsule(c10::make_intrusive<Scale>(scale));
    context->saved_data["shape"] = loss.sizes().vec();
    context->saved_data["dtype"] = loss.scalar_type();
    return x;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto capsule = context->saved_data["scale"].toCapsule();
    const double value = static_cast<const Scale&>(*capsule).scale->value;
    const auto dtype = context->saved_data["dtype"].toScalarType();
    return {grads[0],
            at::full(context->saved_data["shape"].toIntVector(), value,
                     grads[0].options().dtype(dtype)),
            {}};
  }
};

/// The choices to be balanced; `map` has those of the router.
at::Tensor balanced_choices(const at::Tensor& shares, const at::Tensor& map,
                            const TransformerConfig& config) {
  if (!config.moe_router_enable_expert_bias && !config.moe_router_num_groups) return map;
  const at::Tensor best = std::get<1>(shares.detach().topk(config.moe_router_topk, 1));
  const at::Tensor counts = map.any(1, /*keepdim=*/true).expand_as(best);
  return at::zeros_like(map).scatter_(1, best, counts);
}

}  // namespace

RouterLosses::RouterLosses(const TransformerConfig& config, const ParallelState& state,
                           c10::Device device)
    : config_(config), state_(state) {
  const bool global = config.moe_router_load_balancing_type == RouterLoadBalancing::global_aux_loss;
  if (config.moe_aux_loss_coeff > 0) state.group(global ? GroupKind::tp_dp_cp : GroupKind::tp_cp);
  if (config.moe_aux_loss_coeff > 0 && global)
    counts_ = at::zeros({1, *config.num_experts}, at::TensorOptions(device).dtype(at::kLong));
}

void RouterLosses::reset() {
  if (counts_.defined()) counts_.zero_();
}

at::Tensor RouterLosses::balancing(const at::Tensor& logits, const Routing& routing,
                                   int64_t sequence, int64_t batch) {
  const int64_t experts = logits.size(1);
  const auto kind = config_.moe_router_load_balancing_type;
  const bool global = kind == RouterLoadBalancing::global_aux_loss;
  const at::Tensor shares = router_shares(logits, config_.moe_router_score_function);
  const at::Tensor choices = balanced_choices(shares, routing.map, config_);
  at::Tensor counts = choices.view({sequence, batch, experts}).sum(0);  // [batch, experts]
  if (kind != RouterLoadBalancing::seq_aux_loss) counts = counts.sum(0, /*keepdim=*/true);
  counts = counts.contiguous();
  all_reduce(state_.group(global ? GroupKind::tp_dp_cp : GroupKind::tp_cp), counts, ReduceOp::sum,
             "tokens of the experts")
      .wait();
  if (global) counts = counts_.add_(counts);
  const at::Tensor fractions =
      counts.to(logits.scalar_type()) / counts.sum(1, /*keepdim=*/true).clamp_min(1);
  return (shares.view({sequence, batch, experts}) * fractions).sum(-1) *
         (config_.moe_aux_loss_coeff * static_cast<double>(experts));
}

at::Tensor RouterLosses::per_token(const at::Tensor& logits, const Routing& routing,
                                   int64_t sequence, int64_t batch) {
  at::Tensor loss;
  if (config_.moe_aux_loss_coeff > 0) loss = balancing(logits, routing, sequence, batch);
  if (config_.moe_z_loss_coeff > 0) {
    const at::Tensor z =
        logits.logsumexp(-1).square().view({sequence, batch}) * config_.moe_z_loss_coeff;
    loss = loss.defined() ? loss + z : z;
  }
  return loss;
}

at::Tensor attach_loss(const at::Tensor& x, const at::Tensor& loss,
                       const std::shared_ptr<const TokenLossScale>& scale) {
  return AttachLoss::apply(x, loss, scale ? scale : std::make_shared<const TokenLossScale>());
}

}  // namespace lockstep
