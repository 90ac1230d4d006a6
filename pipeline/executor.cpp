#include "lockstep/pipeline/executor.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <tuple>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/core/check.h"
#include "lockstep/core/step_clock.h"
#include "lockstep/core/trace_scope.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/pipeline/communication_steps.h"
#include "lockstep/pipeline/first_messages.h"
#include "lockstep/pipeline/gradient_watch.h"
#include "lockstep/pipeline/schedule_check.h"
#include "lockstep/pipeline/split_backward.h"

namespace lockstep {

using torch::autograd::Edge;

struct PipelineExecutor::Plan {
  ProcessGroup group;
  c10::Device device;
  PipelineSchedule schedule;
  PipelineExecutorOptions options;
  std::shared_ptr<StepClock> clock;
  std::vector<PipelineStep> steps;
  std::vector<std::vector<size_t>> early;
  std::vector<std::optional<TransferLabel>> labels;  ///< of each step that transfers
  bool limits_outputs;                               ///< of forwards; see executor.h
};

namespace {

/// Tasks of a rank, as keys.
using Key = std::tuple<TaskKind, int64_t, int64_t>;
Key key_of(const PipelineTask& task) { return {task.kind, task.chunk, task.microbatch}; }

/// Outputs that may still be on their way when the next one is computed. Then two wait here, as
/// many as the receiver has ahead.
constexpr size_t kOutputsAhead = 1;

/// Whether no gradient that comes back keeps a rank from running far ahead of a slower one.
bool runs_ahead(const PipelineSchedule& schedule) {
  if (schedule.chunks > 1 || schedule.pipeline() == 1) return false;
  const auto& last = schedule.ranks.back();
  return std::all_of(last.begin(), last.begin() + schedule.microbatches,
                     [](const PipelineTask& task) { return task.kind == TaskKind::forward; });
}

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

/// The label of a step of `rank`; unset if it transfers nothing.
std::optional<TransferLabel> label_of(const PipelineStep& step, const PipelineSchedule& schedule,
                                      int64_t rank) {
  if (step.kind == PipelineStep::Kind::compute) return std::nullopt;
  const PlacedTask consumer = step.kind == PipelineStep::Kind::receive
                                  ? PlacedTask{rank, step.task}
                                  : *schedule.consumer_of(rank, step.task);
  return TransferLabel(
      fmt::format("input of {} of pipeline rank {}", to_string(consumer.task), consumer.rank));
}

void run_backward(const Edge& output, const at::Tensor& grad) {
  torch::autograd::Engine::get_default_engine().execute({output}, {grad}, /*keep_graph=*/false,
                                                        /*create_graph=*/false,
                                                        /*accumulate_grad=*/true);
}

/// While this lives, backwards may leave weight gradients for later. Afterwards none of these are
/// left, even if a backward failed.
class Deferring {
 public:
  Deferring(DeferredGradients* deferred, bool on) : deferred_(deferred) {
    if (deferred_) deferred_->defer(on);
  }
  ~Deferring() {
    if (!deferred_) return;
    deferred_->defer(false);
    deferred_->take();
  }
  Deferring(const Deferring&) = delete;
  Deferring& operator=(const Deferring&) = delete;

  std::vector<DeferredGradients::Task> take() {
    return deferred_ ? deferred_->take() : std::vector<DeferredGradients::Task>();
  }

 private:
  DeferredGradients* deferred_;
};

}  // namespace

/// One run of a plan.
class PipelineExecutor::Run {
 public:
  Run(const Plan& plan, const std::vector<PipelineStage>& stages, SendQueue& sends, bool first)
      : plan_(plan),
        stages_(stages),
        rank_(plan.group.rank()),
        first_(first),
        loads_kernels_(first && !plan.device.is_cpu() && !plan.device.is_meta()),
        sends_(sends) {}
  /// Drops unsent messages, because they refer to this run.
  ~Run() { sends_.drop(); }
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  void run() {
    for (size_t i = 0; i < plan_.steps.size(); ++i) {
      const PipelineStep& step = plan_.steps[i];
      if (!loads_kernels_)
        for (const size_t receive : plan_.early[i]) start_receive(receive);
      else if (step.kind == PipelineStep::Kind::receive)
        start_receive(i);
      if (step.kind == PipelineStep::Kind::compute)
        compute(step.task);
      else if (step.kind == PipelineStep::Kind::receive)
        inbox_.at(key_of(step.task)).receive_data();
      else
        send(i);
    }
    if (plan_.group.size() == 1) return;
    const InPart waiting(plan_.clock.get(), StepPart::communication);
    sends_.finish();
  }

 private:
  /// A micro-batch of a chunk between its forward and the end of its backward.
  struct InFlight {
    at::Tensor input;
    TensorShape output_shape;
    Edge output = {};  ///< where backward begins; not valid if nothing requires a gradient
    std::unique_ptr<SplitBackward> split = {};
    std::vector<DeferredGradients::Task> deferred = {};
  };

  void note(TraceEvent::Kind kind, const PipelineTask& task, int64_t begin) const {
    if (plan_.options.trace) plan_.options.trace->add({kind, rank_, to_string(task), begin, now()});
  }

  void start_receive(size_t index) {
    const PipelineStep& step = plan_.steps[index];
    if (plan_.options.trace) receiving_[key_of(step.task)] = now();
    const TransferLabel& label = *plan_.labels[index];
    const auto& declared = plan_.options.activation_shape;
    IncomingTensor& slot = inbox_[key_of(step.task)];
    if (step.task.kind == TaskKind::backward)
      slot = IncomingTensor(plan_.group, plan_.device, flight(step.task).output_shape, step.peer,
                            label);
    else if (declared)
      slot = IncomingTensor(plan_.group, plan_.device, declared(step.task.microbatch), step.peer,
                            label);
    else
      slot = IncomingTensor(plan_.group, plan_.device, step.peer, label);
  }

  void send(size_t index) {
    const PipelineStep& step = plan_.steps[index];
    const auto output = outbox_.extract(key_of(step.task));
    const TransferLabel& label = *plan_.labels[index];
    std::function<void()> sent;
    if (plan_.options.trace)
      sent = [this, task = plan_.schedule.consumer_of(rank_, step.task)->task, begin = now()] {
        note(TraceEvent::Kind::send, task, begin);
      };
    if (step.task.kind == TaskKind::forward && !plan_.options.activation_shape)
      sends_.send_with_shape(plan_.group, output.mapped(), step.peer, label, std::move(sent));
    else
      sends_.send(plan_.group, output.mapped(), step.peer, label, std::move(sent));
  }

  void wait_for_receivers() {
    const InPart waiting(plan_.clock.get(), StepPart::communication);
    sends_.wait_until_left(kOutputsAhead);
  }

  void compute(const PipelineTask& task) {
    if (plan_.limits_outputs && task.kind == TaskKind::forward) wait_for_receivers();
    const at::Tensor input = take_input(task);
    const TraceScope scope([&] { return to_string(task); });
    const int64_t begin = now();
    const InPart part(plan_.clock.get(),
                      task.kind == TaskKind::forward ? StepPart::forward : StepPart::backward);
    if (task.kind == TaskKind::forward)
      forward(task, input);
    else if (task.kind == TaskKind::backward)
      backward(task, input);
    else
      weight(task);
    note(TraceEvent::Kind::task, task, begin);
  }

  at::Tensor take_input(const PipelineTask& task) {
    const auto found = inbox_.extract(key_of(task));
    if (found.empty()) return {};
    const int64_t begin = now();
    at::Tensor input = found.mapped().take();
    if (const auto receive = receiving_.extract(key_of(task)); !receive.empty()) {
      note(TraceEvent::Kind::wait, task, begin);
      note(TraceEvent::Kind::receive, task, receive.mapped());
    }
    return input;
  }

  /// Passes the output of `task` on to the task that waits for it.
  void pass_on(const PipelineTask& task, const at::Tensor& output) {
    const auto consumer = plan_.schedule.consumer_of(rank_, task);
    if (!consumer) return;
    if (task.kind == TaskKind::forward) check_output(task, output, consumer->rank);
    const at::Tensor data = output.detach().contiguous();
    if (consumer->rank == rank_)
      inbox_[key_of(consumer->task)] = IncomingTensor(data);
    else
      outbox_[key_of(task)] = data;
  }

  /// The other side receives on the job's device, and what was declared.
  void check_output(const PipelineTask& task, const at::Tensor& output, int64_t consumer) const {
    require<UsageError>(consumer == rank_ || output.device().type() == plan_.device.type(),
                        "pipeline stage of chunk {} of rank {}: found an output on {}, allowed: "
                        "{}, the device of the job",
                        task.chunk, rank_, output.device().str(), plan_.device.str());
    if (!plan_.options.activation_shape) return;
    const TensorShape shape = plan_.options.activation_shape(task.microbatch);
    if (output.sizes() == shape.sizes && output.scalar_type() == shape.dtype) return;
    fail<UsageError>(
        "pipeline stage of chunk {} of rank {}: found {} of {}, allowed: {} of {}, as declared for "
        "micro-batch {}",
        task.chunk, rank_, fmt::join(output.sizes(), " x "), at::toString(output.scalar_type()),
        fmt::join(shape.sizes, " x "), at::toString(shape.dtype), task.microbatch);
  }

  void check_loss(const PipelineTask& task, const at::Tensor& loss, bool uses_gradients) const {
    require<UsageError>(loss.numel() == 1,
                        "pipeline stage of chunk {} of rank {}: the loss has {} elements, allowed: "
                        "1",
                        task.chunk, rank_, loss.numel());
    require<UsageError>(loss.requires_grad() || !uses_gradients,
                        "pipeline stage of chunk {} of rank {}: found a loss that requires no "
                        "gradient although parameters do, allowed: one that is not detached, not "
                        "an integer and not computed under NoGradGuard",
                        task.chunk, rank_);
  }

  void forward(const PipelineTask& task, const at::Tensor& input) {
    const bool trains = !plan_.schedule.forward_only;
    InFlight flight;
    flight.input = input;
    const bool last = !plan_.schedule.consumer_of(rank_, task);
    if (trains && flight.input.defined()) flight.input.set_requires_grad(true);
    const at::AutoGradMode grad_mode(trains);
    // A stage with an input that loses the gradient is found by its backward.
    std::optional<GradientWatch> watch;
    if (first_ && last && trains && !flight.input.defined()) watch.emplace();
    const at::Tensor output =
        stages_[static_cast<size_t>(task.chunk)](task.microbatch, flight.input);
    if (last && !trains) return;
    require<UsageError>(output.defined(), "pipeline stage of chunk {} of rank {}: returned nothing",
                        task.chunk, rank_);
    if (last) check_loss(task, output, watch && watch->seen());
    pass_on(task, output);
    if (!trains) return;
    flight.output_shape = {output.sizes().vec(), output.scalar_type()};
    if (output.requires_grad()) {
      flight.output = torch::autograd::impl::gradient_edge(output);
      if (plan_.schedule.split_backward && !plan_.options.deferred)
        flight.split = std::make_unique<SplitBackward>(output, flight.input);
    }
    in_flight_[{task.chunk, task.microbatch}] = std::move(flight);
  }

  InFlight& flight(const PipelineTask& task) {
    return in_flight_.at({task.chunk, task.microbatch});
  }

  void backward(const PipelineTask& task, at::Tensor grad) {
    InFlight& flight = this->flight(task);
    if (!grad.defined())
      grad = at::ones(flight.output_shape.sizes,
                      at::TensorOptions(plan_.device).dtype(flight.output_shape.dtype));
    const auto compute = [&]() -> at::Tensor {
      if (flight.split) return flight.split->input_part(grad);
      if (!flight.output.is_valid()) return {};
      Deferring deferring(plan_.options.deferred.get(), plan_.schedule.split_backward);
      run_backward(flight.output, grad);
      flight.deferred = deferring.take();
      flight.output = {};  // and with it the rest of the graph
      return flight.input.defined() ? flight.input.grad() : at::Tensor();
    };
    const at::Tensor input_grad =
        plan_.options.backward ? plan_.options.backward(task, compute) : compute();
    if (plan_.schedule.consumer_of(rank_, task)) {
      require<UsageError>(input_grad.defined(),
                          "pipeline stage of chunk {} of rank {}: the output does not depend on "
                          "the input",
                          task.chunk, rank_);
      pass_on(task, input_grad);
    }
    flight.input.reset();
    flight.output = {};
    if (!plan_.schedule.split_backward) in_flight_.erase({task.chunk, task.microbatch});
  }

  void weight(const PipelineTask& task) {
    InFlight& flight = this->flight(task);
    const auto compute = [&] {
      if (flight.split) flight.split->weight_part();
      const at::NoGradGuard no_grad;
      for (const DeferredGradients::Task& add_gradient : flight.deferred) add_gradient();
    };
    plan_.options.weight ? plan_.options.weight(task, compute) : compute();
    in_flight_.erase({task.chunk, task.microbatch});
  }

  const Plan& plan_;
  const std::vector<PipelineStage>& stages_;
  const int64_t rank_;
  const bool first_;
  /// Loading a kernel may wait for everything that runs, so for receives too. In the order of the
  /// steps nothing deadlocks, even if transfers block. A planned rank shows what later runs do.
  const bool loads_kernels_;
  std::map<Key, IncomingTensor> inbox_;                        ///< by the task that takes it
  std::map<Key, at::Tensor> outbox_;                           ///< by the task that made it
  std::map<std::pair<int64_t, int64_t>, InFlight> in_flight_;  ///< by chunk and micro-batch
  std::map<Key, int64_t> receiving_;                           ///< since when, for the trace
  SendQueue& sends_;
};

PipelineExecutor::PipelineExecutor(const ParallelState& parallel_state, PipelineSchedule schedule,
                                   PipelineExecutorOptions options) {
  const ProcessGroup group = parallel_state.group(GroupKind::pp);
  require<UsageError>(schedule.pipeline() == group.size(),
                      "pipeline schedule: found one for {} ranks, allowed: {}, the size of group "
                      "{}",
                      schedule.pipeline(), group.size(), group.to_string());
  check_schedule(schedule);
  StepLists all_steps = communication_steps(schedule);
  connect_pairs(group, message_pairs(all_steps));
  auto early = early_receives(all_steps, group.rank());
  std::vector<PipelineStep> steps = std::move(all_steps[static_cast<size_t>(group.rank())]);
  std::vector<std::optional<TransferLabel>> labels;
  for (const PipelineStep& step : steps) labels.push_back(label_of(step, schedule, group.rank()));
  const bool limits_outputs = runs_ahead(schedule);
  plan_ = std::make_unique<const Plan>(Plan{group, parallel_state.device(), std::move(schedule),
                                            std::move(options), parallel_state.step_clock(),
                                            std::move(steps), std::move(early), std::move(labels),
                                            limits_outputs});
  sends_ = std::make_unique<SendQueue>();
}

PipelineExecutor::~PipelineExecutor() = default;

void PipelineExecutor::run(const std::vector<PipelineStage>& stages) const {
  Run run(*plan_, stages, *sends_, /*first=*/!has_run_.exchange(true));
  try {
    require<UsageError>(static_cast<int64_t>(stages.size()) == plan_->schedule.chunks,
                        "pipeline: found {} stages, allowed: one for each of the {} chunks of the "
                        "schedule",
                        stages.size(), plan_->schedule.chunks);
    run.run();
  } catch (const std::exception& error) {
    plan_->group.post_failure(error.what());
    throw;
  } catch (...) {
    plan_->group.post_failure("a stage threw an exception of an unknown type");
    throw;
  }
}

const PipelineSchedule& PipelineExecutor::schedule() const { return plan_->schedule; }

}  // namespace lockstep
