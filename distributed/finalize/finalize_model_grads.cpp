#include "lockstep/distributed/finalize_model_grads.h"

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/trace_scope.h"
#include "lockstep/core/upload.h"
#include "lockstep/distributed/finalize_passes.h"
#include "lockstep/distributed/further_passes.h"
#include "lockstep/distributed/notify_on_error.h"
#include "lockstep/distributed/owned_grads.h"
#include "lockstep/distributed/parameter_check.h"
#include "lockstep/distributed/step_access.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/pipeline_position.h"

namespace lockstep {
namespace {

constexpr const FinalizePass* kPasses[] = {&kDataParallel, &kPartialGradients, &kTiedGradients,
                                           &kRouterBias, &kNumTokens};

void finish_data_parallel(FinalizeContext& context) {
  for (DistributedDataParallel* model : context.models)
    for (const BucketReduction& bucket : detail::StepAccess::begin_finalize(*model)) {
      context.note(bucket.group, bucket.operation, bucket.bytes, bucket.num_parameters);
      if (bucket.instances)
        context.note(*bucket.instances, {GradOperation::Kind::all_reduce, bucket.operation.op},
                     bucket.instance_bytes, bucket.num_parameters);
    }
}

bool on_last_stage(const ParallelState& state) {
  return PipelinePosition(state.grids(), state.rank()).is_last_stage();
}

/// The tokens given for this rank: [] in new memory, as `options` say.
at::Tensor given_tokens(const FinalizeContext& context, const at::TensorOptions& options) {
  const at::Tensor given = context.num_tokens->detach().to(options.dtype()).reshape({});
  if (given.is_cpu() && !options.device().is_cpu()) return upload(given, options.device());
  return given.to(options.device()).clone();
}

/// The tokens of the global batch.
at::Tensor sum_of_tokens(FinalizeContext& context) {
  const ParallelState& state = context.state();
  const at::TensorOptions options = at::TensorOptions(state.device()).dtype(at::kDouble);
  at::Tensor tokens =
      on_last_stage(state) ? given_tokens(context, options) : at::zeros({}, options);
  const auto bytes = static_cast<int64_t>(tokens.nbytes());
  if (state.grids().size(GroupKind::pp) > 1) {
    const ProcessGroup stages = state.group(GroupKind::pp);
    broadcast(stages, tokens, stages.size() - 1, "num_tokens").wait();
    context.note(stages, {GradOperation::Kind::broadcast}, bytes, 0);
  }
  const ProcessGroup replicas = state.group(GroupKind::dp_cp);
  all_reduce(replicas, tokens, ReduceOp::sum, "num_tokens").wait();
  context.note(replicas, kAllReduceSum, bytes, 0);
  return tokens.clamp_min_(1);
}

void divide_by_tokens(FinalizeContext& context) {
  if (!context.per_token()) return;
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = sum_of_tokens(context);
  for (DistributedDataParallel* model : context.models)
    for (const auto& buffer : model->buffers()) divide_grads(reduced_grads(*buffer), tokens);
  context.report.num_tokens = tokens;
}

void check_num_tokens(const FinalizeContext& context) {
  require<UsageError>(!context.per_token() || context.num_tokens || !on_last_stage(context.state()),
                      "finalize_model_grads: num_tokens is missing; the gradients are sums over "
                      "tokens (ddp.calculate_per_token_loss)");
  require<UsageError>(context.per_token() || !context.num_tokens,
                      "finalize_model_grads: num_tokens was given, but the gradients are averages "
                      "over ranks; it needs ddp.calculate_per_token_loss");
  if (context.num_tokens) check_token_count(*context.num_tokens, "finalize_model_grads");
}

void check_arguments(const FinalizeContext& context) {
  for (const DistributedDataParallel* model : context.models)
    require<UsageError>(model->scaling_mode() == context.models.front()->scaling_mode(),
                        "finalize_model_grads: one model has {} scaling and another {}",
                        to_string(context.models.front()->scaling_mode()),
                        to_string(model->scaling_mode()));
  check_num_tokens(context);
  for (const FinalizePass* pass : kPasses)
    if (pass->check) pass->check(context);
}

}  // namespace

const FinalizePass kDataParallel = {.name = "data-parallel", .run = finish_data_parallel};

const FinalizePass kNumTokens = {
    .name = "num_tokens",
    .run = divide_by_tokens,
    .changes = [](const ParamDescription&, const RankGrids&,
                  GradientScalingMode mode) { return mode == GradientScalingMode::per_token; },
    .left_undone = "not divided by the tokens"};

const char* further_pass(const ParamDescription& description, const RankGrids& grids,
                         GradientScalingMode mode) {
  const char* left_undone = nullptr;
  for (const FinalizePass* pass : kPasses)
    if (pass->changes && pass->changes(description, grids, mode)) left_undone = pass->left_undone;
  return left_undone;
}

std::string to_string(const FinalizeReport::Entry& entry) {
  return fmt::format("{}: {} over {}, {} bytes, {} parameters", entry.pass,
                     to_string(entry.operation), entry.group.to_string(), entry.bytes,
                     entry.parameters);
}

std::string to_string(const FinalizeReport& report) {
  std::string text;
  for (const FinalizeReport::Entry& entry : report.entries) text += to_string(entry) + "\n";
  return text;
}

void FinalizeContext::note(const ProcessGroup& group, const GradOperation& operation, int64_t bytes,
                           int64_t parameters) {
  report.entries.push_back({pass, group, operation, bytes, parameters});
}

FinalizeReport finalize_model_grads(const std::vector<DistributedDataParallel*>& models,
                                    const std::optional<at::Tensor>& num_tokens,
                                    const std::vector<RouterBias>& router_biases) {
  check_model_list(models, "finalize_model_grads");
  FinalizeContext context{models, num_tokens, router_biases};
  notify_on_error(context.state(), [&] {
    check_arguments(context);
    for (const FinalizePass* pass : kPasses) {
      const TraceScope scope([&] { return fmt::format("finalize: {}", pass->name); });
      context.pass = pass->name;
      pass->run(context);
    }
  });
  for (DistributedDataParallel* model : models) detail::StepAccess::end_finalize(*model);
  return std::move(context.report);
}

}  // namespace lockstep
