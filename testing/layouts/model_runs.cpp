#include "lockstep/testing/model_runs.h"

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/exception_text.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/distributed/step_access.h"
#include "lockstep/optimizer/optimizer.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/pipeline_position.h"
#include "lockstep/pipeline/executor.h"
#include "lockstep/testing/activation_trace.h"
#include "lockstep/testing/param_pieces.h"
#include "lockstep/testing/rank_threads.h"
#include "lockstep/testing/whole_model.h"

namespace lockstep::testing {
namespace {

constexpr const char* kCaller = "check_layouts";

/// A copy with infinity in place of NaN.
at::Tensor copy_of(const at::Tensor& tensor) {
  return at::nan_to_num(tensor.detach(), INFINITY, INFINITY, -INFINITY);
}

TensorsByName values_of(const std::vector<NamedParameter>& params) {
  TensorsByName values;
  for (const NamedParameter& param : params) values[param.name] = copy_of(param.tensor);
  return values;
}

void assign(const std::vector<NamedParameter>& params, const TensorsByName& values) {
  const at::NoGradGuard no_grad;
  for (const NamedParameter& param : params) at::Tensor(param.tensor).copy_(values.at(param.name));
}

/// Adds noise to constant parameters, so that their elements can be told apart.
void make_generic(const std::vector<NamedParameter>& params) {
  const at::NoGradGuard no_grad;
  for (const NamedParameter& param : params) {
    at::Tensor values = param.tensor.detach();
    if (values.numel() == 0 || !at::isFloatingType(values.scalar_type())) continue;
    if (values.numel() > 1 && values.max().item<double>() != values.min().item<double>()) continue;
    at::Tensor noise = at::empty_like(values);
    fill_normal(noise, 0.1, /*seed=*/7, param.name, noise.sizes());
    values.add_(noise);
  }
}

void finalize(const CheckedModel& model, torch::nn::Module& module, DistributedDataParallel& ddp,
              double tokens) {
  std::optional<at::Tensor> num_tokens;
  if (ddp.scaling_mode() == GradientScalingMode::per_token)
    num_tokens = at::full({}, tokens, at::kDouble);
  if (model.options.finalize)
    model.options.finalize(module, ddp, num_tokens);
  else
    finalize_model_grads({&ddp}, num_tokens);
}

/// Updates the weights of the single process with the gradients of plain autograd.
class PlainUpdate {
 public:
  explicit PlainUpdate(const CheckedModel& model)
      : model_(model),
        module_(make_whole_model(model.make, model.context(state_, false))),
        params_(collect_parameters(*module_)) {}

  TensorsByName update(const TensorsByName& weights, const TensorsByName& grads) {
    assign(params_, weights);
    if (!ddp_) {
      ddp_ = std::make_unique<DistributedDataParallel>(params_, state_, model_.options.ddp,
                                                       /*disable_bucketing=*/false,
                                                       model_.options.matrices());
      optimizer_ = std::make_unique<Optimizer>(std::vector{ddp_.get()}, model_.options.optimizer,
                                               model_.options.overrides, model_.options.rule);
    }
    optimizer_->reload_model_params();
    ddp_->zero_grad();
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (const NamedParameter& param : params_) {
      if (!param.tensor.requires_grad()) continue;
      const auto grad = grads.find(param.name);
      loss =
          loss +
          (param.tensor * (grad == grads.end() ? at::zeros({}, at::kDouble) : grad->second)).sum();
    }
    loss.backward();
    std::optional<at::Tensor> one;
    if (ddp_->scaling_mode() == GradientScalingMode::per_token) one = at::ones({}, at::kDouble);
    finalize_model_grads({ddp_.get()}, one);
    optimizer_->step();
    ddp_->finish_param_sync();
    return values_of(params_);
  }

 private:
  const CheckedModel& model_;
  ParallelState state_ = ParallelState::single_process();
  std::shared_ptr<torch::nn::Module> module_;
  std::vector<NamedParameter> params_;
  std::unique_ptr<DistributedDataParallel> ddp_;
  std::unique_ptr<Optimizer> optimizer_;
};

void run_plainly(const CheckedModel& model, torch::nn::Module& module,
                 const ParallelContext& context, int64_t step, RunRecord& run) {
  StepRecord& record = run.steps.emplace_back();
  record.before = values_of(run.params);
  for (const NamedParameter& param : run.params) at::Tensor(param.tensor).mutable_grad().reset();
  for (int64_t m = 0; m < model.options.microbatches; ++m) {
    at::Tensor loss;
    {
      const ActivationTrace trace(run.params, m, record.uses);
      loss = model.loss(module, {context, step, m, {}});
    }
    require<UsageError>(loss.defined() && loss.numel() == 1,
                        "{}: the loss in one process must be one element", kCaller);
    record.loss += loss.item<double>();
    require<UsageError>(std::isfinite(record.loss), "{}: found a loss of {} in one process",
                        kCaller, record.loss);
    loss.backward();
  }
  double squares = 0;
  for (const NamedParameter& param : run.params)
    if (param.tensor.grad().defined()) {
      record.local[param.name] = copy_of(param.tensor.grad());
      const double square = param.tensor.grad().square().sum().item<double>();
      require<UsageError>(std::isfinite(square),
                          "{}: parameter '{}': its gradient in one process is not finite", kCaller,
                          param.name);
      squares += square;
    }
  record.reduced = record.local;
  record.norm = std::sqrt(squares);
}

void require_finite_update(const StepRecord& record) {
  for (const auto& [name, weights] : record.weights) {
    const at::Tensor spoilt =
        at::isfinite(record.before.at(name)).logical_and(at::isfinite(weights).logical_not());
    require<UsageError>(!spoilt.any().item<bool>(),
                        "{}: parameter '{}': its weights after the update in one process are not "
                        "finite",
                        kCaller, name);
  }
}

TensorsByName reduced_grads_of(const DistributedDataParallel& ddp) {
  TensorsByName grads;
  for (const ParamAndGradBuffer* buffer : ddp.buffers())
    for (size_t i = 0; i < buffer->params().size(); ++i) {
      const NamedParameter& param = buffer->params()[i];
      const auto& slot = buffer->layout().slots[i];
      at::Tensor flat = at::full({param.tensor.numel()}, NAN, at::kDouble);
      for (const ElementRange& range : buffer->reduced()) {
        const int64_t first = std::max(range.start, slot.start);
        const int64_t last = std::min(range.end, slot.end);
        if (first < last)
          flat.slice(0, first - slot.start, last - slot.start)
              .copy_(copy_of(buffer->held_grads({first, last})));
      }
      grads[param.name] = flat.view(param.tensor.sizes());
    }
  return grads;
}

/// One rank of a layout.
class RankRun {
 public:
  RankRun(const CheckedModel& model, const RankLayout& layout, const RunRecord& reference,
          const ParallelState& state, RunRecord& run)
      : model_(model),
        reference_(reference),
        state_(state),
        run_(run),
        context_(model.context(state, layout.sequence_parallel)),
        module_(model.make(context_)) {
    module_->train();
    run_.params = collect_parameters(*module_);
    run_.own_initial = values_of(run_.params);
  }

  void train() {
    assign_pieces(run_.params, reference_.steps.front().before, state_.grids(), state_.rank());
    ddp_.emplace(*module_, state_, model_.options.ddp, /*disable_bucketing=*/false,
                 model_.options.matrices());
    optimizer_.emplace(std::vector{&*ddp_}, model_.options.optimizer, model_.options.overrides,
                       model_.options.rule);
    const int64_t stages = state_.grids().size(GroupKind::pp);
    const PipelineExecutor executor(
        state_, make_schedule({.pipeline = stages, .microbatches = model_.options.microbatches}));
    for (int64_t step = 0; step < model_.options.steps && run_.not_final.empty(); ++step)
      train_step(executor, step);
  }

 private:
  void train_step(const PipelineExecutor& executor, int64_t step) {
    StepRecord& record = run_.steps.emplace_back();
    ddp_->zero_grad();
    ddp_->unshard();
    record.before = values_of(run_.params);
    const bool has_loss = PipelinePosition(state_.grids(), state_.rank()).is_last_stage();
    {
      const auto unsynchronized = ddp_->no_sync();
      executor.run({[&](int64_t m, const at::Tensor& hidden) {
        at::Tensor output;
        {
          const ActivationTrace trace(run_.params, m, record.uses);
          output = model_.loss(*module_, {context_, step, m, hidden});
        }
        if (has_loss && output.defined()) record.loss += output.detach().sum().item<double>();
        return output;
      }});
    }
    for (const NamedParameter& param : run_.params)
      if (param.tensor.grad().defined()) record.local[param.name] = copy_of(param.tensor.grad());
    ddp_->start_grad_sync();
    const bool first = state_.grids().groups(GroupKind::dp_cp).position_of(state_.rank()) == 0;
    finalize(model_, *module_, *ddp_, first ? 1 : 0);
    try {
      detail::StepAccess::require_final_gradients(*ddp_, kCaller);
    } catch (const UsageError& error) {
      run_.not_final = error.what();
    }
    if (ddp_->state_text() == "reducing") ddp_->finish_grad_sync();
    share_not_final();
    record.reduced = reduced_grads_of(*ddp_);
    if (!run_.not_final.empty()) return;
    record.norm = optimizer_->step().grad_norm;
    ddp_->unshard();
    record.weights = values_of(run_.params);
  }

  /// Gives all ranks the first text, so that none goes on to the update alone.
  void share_not_final() {
    for (const std::string& text :
         all_gather_texts(state_.world(), run_.not_final, "final gradients"))
      if (run_.not_final.empty()) run_.not_final = text;
  }

  const CheckedModel& model_;
  const RunRecord& reference_;
  const ParallelState& state_;
  RunRecord& run_;
  ParallelContext context_;
  std::shared_ptr<torch::nn::Module> module_;
  std::optional<DistributedDataParallel> ddp_;
  std::optional<Optimizer> optimizer_;
};

/// The parameter that a message names: the one with the longest name in it.
std::string parameter_in(const std::string& message, const RunRecord& reference) {
  std::string name;
  for (const NamedParameter& param : reference.params)
    if (message.find(param.name) != std::string::npos && param.name.size() > name.size())
      name = param.name;
  return name;
}

}  // namespace

OptimizerConfig plain_sgd() {
  OptimizerConfig config;
  config.optimizer = OptimizerKind::sgd;
  config.sgd_momentum = 0;
  config.lr = 0.001;
  config.weight_decay = 0.01;
  config.clip_grad = 0;
  return config;
}

bool CheckedModel::per_token() const {
  return options.ddp.calculate_per_token_loss.value_or(!options.ddp.average_in_collective);
}

ParallelContext CheckedModel::context(const ParallelState& state, bool sequence_parallel) const {
  return {.state = state,
          .options = at::kDouble,
          .seed = options.seed,
          .sequence_parallel = sequence_parallel};
}

RunRecord run_in_one_process(const CheckedModel& model) {
  const ParallelState state = ParallelState::single_process();
  const ParallelContext context = model.context(state, false);
  const auto module = make_whole_model(model.make, context);
  module->train();
  RunRecord run;
  run.params = collect_parameters(*module);
  require<UsageError>(!run.params.empty(), "{}: the model has no parameters", kCaller);
  run.own_initial = values_of(run.params);
  make_generic(run.params);
  PlainUpdate optimizer(model);
  for (int64_t step = 0; step < model.options.steps; ++step) {
    run_plainly(model, *module, context, step, run);
    StepRecord& record = run.steps.back();
    record.weights = optimizer.update(record.before, record.local);
    require_finite_update(record);
    assign(run.params, record.weights);
  }
  return run;
}

LayoutRun run_on_ranks(const CheckedModel& model, const RankLayout& layout,
                       const RunRecord& reference) {
  LayoutRun result;
  result.ranks.resize(static_cast<size_t>(layout.ranks));
  std::mutex mutex;
  std::string first;
  RankThreadOptions options;
  options.sizes = layout.sizes;
  options.timeout = model.options.timeout;
  const auto body = [&](const ParallelState& state) {
    RunRecord run;
    RankRun rank(model, layout, reference, state, run);
    std::unique_lock<std::mutex> lock(mutex);  // a barrier alone orders nothing that tools can see
    result.ranks[static_cast<size_t>(state.rank())] = run;
    lock.unlock();
    barrier(state.world(), "parameters of the model under test");
    lock.lock();
    if (state.rank() == 0) result.finding = wrong_parameter(reference, result.ranks, layout);
    lock.unlock();
    barrier(state.world(), "comparison of the parameters");
    lock.lock();
    if (result.finding) return;
    lock.unlock();
    rank.train();
    lock.lock();
    result.ranks[static_cast<size_t>(state.rank())] = std::move(run);
  };
  try {
    run_ranks(layout.ranks, body, options);
  } catch (...) {
    const std::string message = text_of_exception();
    result.finding =
        Finding{.pass = "error", .parameter = parameter_in(message, reference), .text = message};
  }
  return result;
}

}  // namespace lockstep::testing
