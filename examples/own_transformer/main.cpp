// Trains the model of model.h with a custom update rule. The losses are the same on every layout,
// and a checkpoint loads on any other.
//
//   own_transformer [TENSOR PIPELINE EXPERT [save|load FOLDER]]
//
// Run alone, or with a multiple of TENSOR x PIPELINE x EXPERT ranks:
//   torchrun --no-python --nproc-per-node 4 ./own_transformer 2 1 2

#include <cstdio>
#include <cstdlib>

#include "model.h"

namespace {

constexpr int64_t kMicrobatches = 4, kSteps = 60, kSavedAt = 30;

std::vector<lockstep::StateTensor> state_of(const own::Stage& stage,
                                            const lockstep::Optimizer& optimizer,
                                            const lockstep::ParallelState& state) {
  std::vector<lockstep::StateTensor> tensors = lockstep::model_state(stage, state);
  for (lockstep::StateTensor& tensor : lockstep::optimizer_state(optimizer, state))
    tensors.push_back(std::move(tensor));
  return tensors;
}

int64_t load(const std::string& folder, const own::Stage& stage, lockstep::Optimizer& optimizer,
             const lockstep::ParallelState& state) {
  lockstep::CheckpointReader checkpoint(folder);
  lockstep::check_no_weight_left(checkpoint, lockstep::model_state(stage, state), state);
  lockstep::load_state(checkpoint, state_of(stage, optimizer, state));
  optimizer.restore({.num_steps = checkpoint.manifest().optimizer_steps});
  optimizer.apply_master_weights();
  return checkpoint.manifest().iteration;
}

double train(const lockstep::ParallelSizes& sizes, const std::string& action,
             const std::string& folder) {
  using namespace lockstep;
  const ParallelState state(read_launch_environment(), {.sizes = sizes});
  own::Stage stage({.state = state, .options = at::kDouble, .sequence_parallel = sizes.tensor > 1});
  const DistributedDataParallelConfig sharded = {.use_distributed_optimizer = true};
  DistributedDataParallel ddp(stage, state, sharded);
  ddp.set_num_microbatches(kMicrobatches);
  Optimizer optimizer({&ddp}, own::optimizer_config(), {}, std::make_shared<own::SoftSign>());
  const PipelineExecutor executor(
      state, make_schedule({.pipeline = sizes.pipeline, .microbatches = kMicrobatches}));

  const ProcessGroup data_ranks = state.group(GroupKind::dp_cp);
  double mean_loss = 0;
  for (int64_t step = action == "load" ? load(folder, stage, optimizer, state) : 0; step < kSteps;
       ++step) {
    if (action == "save" && step == kSavedAt) {
      CheckpointSaver saver(state, {.folder = folder});
      saver.save(state_of(stage, optimizer, state),
                 {.iteration = step, .optimizer = optimizer.progress()}, Config{});
    }
    ddp.zero_grad();
    at::Tensor sums = at::zeros({2}, at::kDouble);  // loss and tokens
    executor.run({[&](int64_t microbatch, const at::Tensor& hidden) {
      const at::Tensor tokens = own::make_batch(data_ranks, step * kMicrobatches + microbatch);
      const at::Tensor output = stage.forward(tokens, hidden);
      if (stage.is_last()) {
        sums[0] += output.detach();
        sums[1] += tokens.size(0) * own::kLength;
      }
      return output;
    }});
    finalize_model_grads({&ddp}, sums[1]);
    optimizer.step();
    for (const GroupKind kind : {GroupKind::dp_cp, GroupKind::pp})
      all_reduce(state.group(kind), sums, ReduceOp::sum, "loss").wait();
    mean_loss = sums[0].item<double>() / sums[1].item<double>();
    if (state.rank() == 0) std::printf("step %2d  loss %.17g\n", static_cast<int>(step), mean_loss);
  }
  return mean_loss;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    constexpr double kGood = 1;  // the untrained model is at about 3.4
    lockstep::ParallelSizes sizes;
    if (argc > 3) {
      sizes.tensor = std::atoi(argv[1]);
      sizes.pipeline = std::atoi(argv[2]);
      sizes.expert = std::atoi(argv[3]);
    }
    const double loss = train(sizes, argc > 5 ? argv[4] : "", argc > 5 ? argv[5] : "");
    return loss < kGood ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "own_transformer: %s\n", error.what());
    return 2;
  }
}
