// Checkpoints of ranks with shards of different sizes, read by ranks that are cut differently.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/checkpoint_saver.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/tests/support/cut_model.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/temporary_folder.h"

namespace lockstep {
namespace {

using testing::on_stage_of;
using testing::piece_of;
using testing::pieces_of_rank;
using testing::run_ranks;
using testing::TemporaryFolder;
using testing::WholeParam;
using testing::WholeTraining;
using enum MeshAxis;

constexpr auto kSum = GradientState::partial_sum;

const std::vector<WholeParam> kModel = {
    {"plain", {2, 10}},
    {"table", {7, 5}, {.placements = {{tp, Shard{0}}}}},
    {"one", {1, 3}, {.placements = {{tp, Shard{0}}}}},
    {"norm", {33}, {.gradient_states = {{tp, kSum}}}},
    {"columns", {3, 13}, {.placements = {{tp, Shard{-1}}}}},
    {"frozen", {11}, {.placements = {{tp, Shard{0}}}}, {}, /*trained=*/false},
    {"e_rows", {5, 3}, {.placements = {{ep, Shard{0}}}, .is_expert = true}},
    {"e_grid", {5, 7}, {.placements = {{etp, Shard{1}}, {ep, Shard{0}}}, .is_expert = true}},
    {"e_twice", {11, 2}, {.placements = {{etp, Shard{0}}, {ep, Shard{0}}}, .is_expert = true}},
    {"e_shared", {45}, {.gradient_states = {{ep, kSum}}, .is_expert = true}},
    {"e_plain", {17}, {.is_expert = true}},
    {"last", {150}}};

struct SavingRun {
  int64_t world;
  ParallelSizes sizes;
  bool distributed;

  RankGrids grids() const {
    ParallelSizes all = sizes;
    all.world_size = world;
    return RankGrids(all);
  }
};

/// Trains one rank's pieces as a module.
class Training : public DescribedModule {
 public:
  Training(const ParallelState& state, bool distributed) : state_(state) {
    for (const NamedParameter& piece : pieces_of_rank(kModel, state)) {
      const bool trained = piece.tensor.requires_grad();
      register_described_parameter(piece.name, piece.tensor, piece.description)
          .requires_grad_(trained);
    }
    DistributedDataParallelConfig config;
    config.use_distributed_optimizer = distributed;
    config.calculate_per_token_loss = false;
    config.bucket_size = 60;
    ddp_ = std::make_unique<DistributedDataParallel>(*this, state, config);
    optimizer_ = make_optimizer({ddp_.get()}, testing::cut_model_optimizer());
  }

  void train(int first, int end) {
    for (int step = first; step < end; ++step) {
      ddp_->zero_grad_buffer();
      testing::backward_of_rank(kModel, collect_parameters(*this), state_, step);
      finalize_model_grads({ddp_.get()});
      optimizer_->step();
    }
    ddp_->finish_param_sync();
  }

  std::vector<StateTensor> state() {
    std::vector<StateTensor> tensors = model_state(*this, state_);
    for (StateTensor& tensor : optimizer_state(*optimizer_, state_))
      tensors.push_back(std::move(tensor));
    return tensors;
  }

  void restore(int64_t steps) {
    OptimizerProgress progress = optimizer_->progress();
    progress.num_steps = steps;
    optimizer_->restore(progress);
  }

 private:
  ParallelState state_;
  std::unique_ptr<DistributedDataParallel> ddp_;
  std::unique_ptr<Optimizer> optimizer_;
};

void save(const SavingRun& run, const std::string& folder, int steps) {
  run_ranks(run.world,
            [&](const ParallelState& state) {
              Training training(state, run.distributed);
              training.train(0, steps);
              CheckpointSaver saver(state, {.folder = folder});
              TrainingProgress progress;
              progress.iteration = steps;
              saver.save(training.state(), progress, Config{});
            },
            {.sizes = run.sizes, .timeout = std::chrono::seconds(10)});
}

void expect_weights(const torch::nn::Module& module, const WholeTraining& whole,
                    const ParallelState& state, const std::string& what) {
  const auto pieces = module.named_parameters();
  for (const WholeParam& param : kModel) {
    const at::Tensor expected =
        piece_of(whole.params.at(param.name), param, state.grids(), state.rank());
    EXPECT_TRUE(at::allclose(pieces[param.name], expected, 1e-11, 1e-12))
        << what << ": '" << param.name << "' on rank " << state.rank();
  }
}

void load_and_go_on(const SavingRun& run, const std::string& folder, const WholeTraining& saved,
                    const WholeTraining& end, const std::string& what) {
  run_ranks(run.world,
            [&](const ParallelState& state) {
              Training training(state, run.distributed);
              CheckpointReader checkpoint(folder);
              load_state(checkpoint, training.state());
              training.restore(2);
              expect_weights(training, saved, state, what + ", loaded");
              training.train(2, 4);
              expect_weights(training, end, state, what + ", two steps later");
            },
            {.sizes = run.sizes, .timeout = std::chrono::seconds(10)});
}

TEST(UnevenCheckpoint, IsReadByAnyOtherLayout) {
  const std::vector<SavingRun> runs = {{1, {}, false},
                                       {4, {.tensor = 2}, true},
                                       {6, {.tensor = 3}, true},
                                       {3, {.tensor = 3}, false},
                                       {8, {.expert = 2, .expert_tensor = 2}, true},
                                       {8, {.tensor = 2, .optimizer_instances = 2}, true}};
  const TemporaryFolder folder;
  for (size_t from = 0; from < runs.size(); ++from) {
    const std::string into = (folder.path() / std::to_string(from)).string();
    const std::vector<RankGrids> first(2, runs[from].grids());
    const WholeTraining saved = testing::train_whole(kModel, first);
    try {
      save(runs[from], into, 2);
      EXPECT_TRUE(verify_checkpoint(into).empty());
      const CheckpointReader checkpoint(into);
      for (const ManifestTensor& tensor : checkpoint.manifest().tensors)
        EXPECT_EQ(tensor.shape, saved.params.at(tensor.name).sizes().vec()) << tensor.key();
      for (size_t to = 0; to < runs.size(); ++to) {
        std::vector<RankGrids> grids = first;
        grids.insert(grids.end(), 2, runs[to].grids());
        load_and_go_on(runs[to], into, saved, testing::train_whole(kModel, grids),
                       std::to_string(from) + " to " + std::to_string(to));
      }
    } catch (const std::exception& error) {
      ADD_FAILURE() << "saved by " << from << ": " << error.what();
    }
  }
}

}  // namespace
}  // namespace lockstep
