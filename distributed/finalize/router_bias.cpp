#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/finalize_passes.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

void check_router_biases(const FinalizeContext& context) {
  for (size_t i = 0; i < context.router_biases.size(); ++i) {
    const RouterBias& router = context.router_biases[i];
    require<UsageError>(
        router.bias.defined() && router.tokens_per_expert.defined() && router.bias.dim() == 1 &&
            router.bias.sizes() == router.tokens_per_expert.sizes() && router.bias.numel() > 0,
        "finalize_model_grads: router bias {}: bias and tokens_per_expert must have one element "
        "for each expert",
        i);
    require<UsageError>(std::isfinite(router.rate) && router.rate >= 0,
                        "finalize_model_grads: router bias {}: found a rate of {}, allowed: >= 0",
                        i, router.rate);
  }
}

void update_router_biases(FinalizeContext& context) {
  if (context.router_biases.empty()) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> counts;
  for (const RouterBias& router : context.router_biases)
    counts.push_back(router.tokens_per_expert.detach().to(context.state().device(), at::kLong));
  const at::Tensor all = at::cat(counts);
  const ProcessGroup group = context.state().group(GroupKind::tp_dp_cp);
  all_reduce(group, all, ReduceOp::sum, "tokens of the experts").wait();
  if (group.size() > 1)
    context.note(group, kAllReduceSum, static_cast<int64_t>(all.nbytes()),
                 static_cast<int64_t>(counts.size()));
  int64_t offset = 0;
  for (const RouterBias& router : context.router_biases) {
    const int64_t experts = router.bias.numel();
    const at::Tensor tokens = all.narrow(0, offset, experts);
    offset += experts;
    const at::Tensor below_mean = at::sign(tokens.sum() - tokens * experts);  // exact
    at::Tensor bias = router.bias.detach(), counters = router.tokens_per_expert.detach();
    bias.add_(below_mean.to(bias.options()), router.rate);
    counters.zero_();
  }
}

}  // namespace

const FinalizePass kRouterBias = {
    .name = "router bias", .run = update_router_biases, .check = check_router_biases};

}  // namespace lockstep
