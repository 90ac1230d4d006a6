#include "lockstep/distributed/finalize_model_grads.h"

#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

/// What the passes work on.
struct Context {
  const std::vector<DistributedDataParallel*>& models;
  const std::optional<at::Tensor>& num_tokens;
  FinalizeReport report;

  const ParallelState& parallel_state() const { return models.front()->parallel_state(); }
  bool per_token() const {
    return models.front()->scaling_mode() == GradientScalingMode::per_token;
  }
};

using Pass = void (*)(Context&);

void finish_data_parallel(Context& context) {
  for (DistributedDataParallel* model : context.models) {
    model->begin_finalize();
    for (const auto& bucket : model->buckets())
      context.report.entries.push_back({"data-parallel", bucket.group, bucket.operation,
                                        bucket.bytes,
                                        static_cast<int64_t>(bucket.parameters.size())});
  }
}

void divide_by_tokens(Context& context) {
  if (!context.per_token()) return;
  const at::NoGradGuard no_grad;
  const ProcessGroup group = context.parallel_state().group(GroupKind::dp_cp);
  at::Tensor tokens = context.num_tokens->detach()
                          .to(context.parallel_state().device(), at::kDouble)
                          .reshape({})
                          .clone();
  all_reduce(group, tokens, ReduceOp::sum, "num_tokens").wait();
  context.report.entries.push_back({"num_tokens", group.to_string(), "all-reduce sum",
                                    static_cast<int64_t>(tokens.nbytes()), 0});
  tokens.clamp_min_(1);
  for (DistributedDataParallel* model : context.models)
    for (const auto& buffer : model->buffers()) at::Tensor(buffer->grad_data()).div_(tokens);
  context.report.num_tokens = tokens;
}

constexpr Pass kPasses[] = {finish_data_parallel, divide_by_tokens};

void check_arguments(const Context& context) {
  require<UsageError>(!context.models.empty(), "finalize_model_grads: no model was given");
  for (const DistributedDataParallel* model : context.models)
    require<UsageError>(model->scaling_mode() == context.models.front()->scaling_mode(),
                        "finalize_model_grads: one model has {} scaling and another {}",
                        to_string(context.models.front()->scaling_mode()),
                        to_string(model->scaling_mode()));
  require<UsageError>(!context.per_token() || context.num_tokens,
                      "finalize_model_grads: num_tokens is missing; the gradients are sums over "
                      "tokens (ddp.calculate_per_token_loss)");
  require<UsageError>(context.per_token() || !context.num_tokens,
                      "finalize_model_grads: num_tokens was given, but the gradients are averages "
                      "over ranks; allowed with: ddp.calculate_per_token_loss");
  if (!context.num_tokens) return;
  const at::Tensor& tokens = *context.num_tokens;
  require<UsageError>(tokens.defined() && tokens.numel() == 1,
                      "finalize_model_grads: num_tokens must have one element");
  if (!tokens.is_cpu()) return;  // reading it would stall the device
  const double value = tokens.to(at::kDouble).item<double>();
  require<UsageError>(std::isfinite(value) && value >= 0,
                      "finalize_model_grads: num_tokens: found {}, allowed: a count >= 0", value);
}

}  // namespace

FinalizeReport finalize_model_grads(const std::vector<DistributedDataParallel*>& models,
                                    const std::optional<at::Tensor>& num_tokens) {
  Context context{models, num_tokens, {}};
  check_arguments(context);
  for (const Pass pass : kPasses) pass(context);
  for (DistributedDataParallel* model : models) model->end_finalize();
  return std::move(context.report);
}

}  // namespace lockstep
