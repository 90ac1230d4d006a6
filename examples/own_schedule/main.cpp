// A pipeline schedule of one's own as data: checked, simulated, drawn, and run on as many ranks as
// there are.
//
//   own_schedule [SVG]
//
// Run alone, or on 2 or 4 ranks: torchrun --no-python --nproc-per-node 4 ./own_schedule

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include "lockstep/lockstep.h"

namespace {

constexpr int64_t kWidth = 8, kLayers = 4, kSamples = 16, kMicrobatches = 8, kSteps = 20;

/// 1F1B in which rank r runs 2 (P - r - 1) forwards ahead instead of P - r - 1.
lockstep::PipelineSchedule eager_1f1b(int64_t ranks, int64_t microbatches) {
  using lockstep::TaskKind;
  lockstep::PipelineSchedule schedule{.microbatches = microbatches};
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t ahead = std::min(2 * (ranks - rank - 1), microbatches);
    std::vector<lockstep::PipelineTask> tasks;
    for (int64_t m = 0; m < microbatches + ahead; ++m) {
      if (m < microbatches) tasks.push_back({TaskKind::forward, m});
      if (m >= ahead) tasks.push_back({TaskKind::backward, m - ahead});
    }
    schedule.warmup.push_back(ahead);
    schedule.ranks.push_back(std::move(tasks));
  }
  return schedule;
}

lockstep::PipelineSchedule plain_1f1b(int64_t ranks, int64_t microbatches) {
  return lockstep::make_schedule({.pipeline = ranks, .microbatches = microbatches});
}

/// Prints the cost of a schedule: its time if a message takes `transfer`, a forward 1 and a
/// backward 2, and the number of micro-batches whose activations are alive at once.
void compare(const char* name, const lockstep::PipelineSchedule& schedule) {
  lockstep::check_schedule(schedule);
  for (const int64_t transfer : {0, 1}) {
    const lockstep::Timeline timeline =
        lockstep::simulate(schedule, lockstep::reference_cost(schedule), transfer);
    std::printf("%-10s  transfer %d  time %d  idle %.3f  live %d\n", name,
                static_cast<int>(transfer), static_cast<int>(timeline.makespan()),
                timeline.bubble_fraction(),
                static_cast<int>(lockstep::peak_live_microbatches(schedule).front()));
  }
}

void draw(const lockstep::PipelineSchedule& schedule, const std::string& path) {
  std::ofstream file(path);
  const lockstep::Timeline timeline =
      lockstep::simulate(schedule, lockstep::reference_cost(schedule), /*transfer=*/1);
  lockstep::write_timeline_svg(file, "eager 1F1B", schedule, timeline);
  if (!file.flush()) throw std::runtime_error("cannot write '" + path + "'");
}

/// The last rank runs all forwards first, as in GPipe; the others run eager 1F1B.
void show_refusal() {
  lockstep::PipelineSchedule schedule = eager_1f1b(4, kMicrobatches);
  const lockstep::PipelineSchedule gpipe = lockstep::make_schedule(
      {.pipeline = 4, .microbatches = kMicrobatches, .family = lockstep::ScheduleFamily::gpipe});
  schedule.ranks[3] = gpipe.ranks[3];
  try {
    lockstep::check_schedule(schedule);
  } catch (const lockstep::UsageError& error) {
    std::printf("refused: %s\n", error.what());
  }
}

/// The layers of one pipeline rank. They learn the sum of the inputs.
struct Stage : torch::nn::Module {
  explicit Stage(const lockstep::ProcessGroup& pipeline)
      : is_last(pipeline.rank() == pipeline.size() - 1) {
    if (kLayers % pipeline.size() != 0) throw std::invalid_argument("ranks: allowed: 1, 2, 4");
    const int64_t own = kLayers / pipeline.size();
    for (int64_t i = pipeline.rank() * own; i < (pipeline.rank() + 1) * own; ++i)
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    for (const auto& param : named_parameters())
      param.value().copy_(0.3 * at::sin(at::arange(param.value().numel(), at::kDouble) * 1.7 +
                                        static_cast<double>(param.key()[5]))
                                    .view(param.value().sizes()));
  }

  /// `hidden` from the stage before, undefined on the first.
  at::Tensor forward(const at::Tensor& inputs, at::Tensor hidden) {
    if (!hidden.defined()) hidden = inputs;
    for (auto& layer : layers) hidden = hidden + at::tanh(layer(hidden));
    return is_last ? (hidden.sum(1) - 2 * inputs.sum(1)).square().sum() : hidden;
  }

  std::vector<torch::nn::Linear> layers;
  bool is_last;
};

at::Tensor make_batch(int64_t number) {
  const at::Tensor i = at::arange(kSamples * kWidth, at::kDouble) + 0.37 * number;
  return at::sin(i * i * 0.61).view({kSamples, kWidth});
}

void train(const char* name, const lockstep::ParallelState& state,
           const lockstep::PipelineSchedule& schedule) {
  Stage stage(state.group(lockstep::GroupKind::pp));
  lockstep::DistributedDataParallel ddp(stage, state);
  ddp.set_num_microbatches(kMicrobatches);
  lockstep::OptimizerConfig config;
  config.lr = 0.01;
  lockstep::Optimizer optimizer({&ddp}, config);
  const lockstep::PipelineExecutor executor(state, schedule);

  at::Tensor loss;
  for (int64_t step = 0; step < kSteps; ++step) {
    ddp.zero_grad();
    loss = at::zeros({}, at::kDouble);
    executor.run({[&](int64_t microbatch, const at::Tensor& hidden) {
      const at::Tensor output =
          stage.forward(make_batch(step * kMicrobatches + microbatch), hidden);
      if (stage.is_last) loss += output.detach() / (kMicrobatches * kSamples);
      return output;
    }});
    lockstep::finalize_model_grads({&ddp}, at::full({}, kMicrobatches * kSamples));
    optimizer.step();
    lockstep::all_reduce(state.group(lockstep::GroupKind::pp), loss, lockstep::ReduceOp::sum,
                         "loss")
        .wait();
    if (state.rank() == 0 && (step == 0 || step == kSteps - 1))
      std::printf("%-10s  step %2d  loss %.17g\n", name, static_cast<int>(step),
                  loss.item<double>());
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto environment = lockstep::read_launch_environment();
    const int64_t ranks = environment.world_size;
    const lockstep::ParallelState state(environment, {.sizes = {.pipeline = ranks}});
    if (state.rank() == 0) {
      compare("1F1B", plain_1f1b(4, kMicrobatches));
      compare("eager 1F1B", eager_1f1b(4, kMicrobatches));
      show_refusal();
      if (argc > 1) draw(eager_1f1b(4, kMicrobatches), argv[1]);
    }
    train("1F1B", state, plain_1f1b(ranks, kMicrobatches));
    train("eager 1F1B", state, eager_1f1b(ranks, kMicrobatches));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "own_schedule: %s\n", error.what());
    return 2;
  }
}
