// A small transformer of one's own, cut over tensor- and pipeline-parallel ranks, with checkpoints
// that load on any layout. The losses are the same on every layout.
//
//   own_model [TENSOR PIPELINE [save|load FOLDER]]
//
// Run alone, or with a multiple of TENSOR x PIPELINE ranks:
//   torchrun --no-python --nproc-per-node 4 ./own_model 2 2

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include <ATen/ATen.h>

#include "lockstep/lockstep.h"

namespace {

constexpr int64_t kTokens = 31, kWidth = 32, kChannels = 8, kBlocks = 4, kLength = 16;
constexpr int64_t kSamples = 4, kMicrobatches = 4, kSteps = 40, kSavedAt = 20;

/// Causal attention, then a feed-forward network: each after a norm, each added to its input.
class Block : public lockstep::DescribedModule {
 public:
  explicit Block(const lockstep::ParallelContext& context) {
    using namespace lockstep;
    using Features = std::vector<int64_t>;
    norm1_ = add_child<Norm>(context, "norm1", kWidth, Normalization::RMSNorm, 1e-5);
    qkv_ = add_child<ColumnParallelLinear>(context, "qkv", kWidth, Features{3, kWidth}, false, 0.1);
    proj_ = add_child<RowParallelLinear>(context, "proj", kWidth, kWidth, false, 0.1);
    norm2_ = add_child<Norm>(context, "norm2", kWidth, Normalization::RMSNorm, 1e-5);
    up_ = add_child<ColumnParallelLinear>(context, "up", kWidth, Features{2 * kWidth}, true, 0.1);
    down_ = add_child<RowParallelLinear>(context, "down", 2 * kWidth, kWidth, true, 0.1);
  }

  /// `hidden` [sequence, batch, width], of which a tensor-parallel rank holds its part of the
  /// sequence -> the same shape
  at::Tensor forward(const at::Tensor& hidden) const {
    const at::Tensor seen = hidden + proj_->forward(attend(qkv_->forward(norm1_->forward(hidden))));
    return seen + down_->forward(at::gelu(up_->forward(norm2_->forward(seen))));
  }

 private:
  /// [sequence, batch, 3 x features] of this rank's heads -> [sequence, batch, features]
  static at::Tensor attend(const at::Tensor& qkv) {
    std::vector<at::Tensor> parts;  // [batch, heads, sequence, channels]
    for (const at::Tensor& part : qkv.chunk(3, 2))
      parts.push_back(part.unflatten(2, {-1, kChannels}).permute({1, 2, 0, 3}));
    return at::scaled_dot_product_attention(parts[0], parts[1], parts[2], /*attn_mask=*/{},
                                            /*dropout_p=*/0, /*is_causal=*/true)
        .permute({2, 0, 1, 3})
        .flatten(2);
  }

  std::shared_ptr<lockstep::Norm> norm1_, norm2_;
  std::shared_ptr<lockstep::ColumnParallelLinear> qkv_, up_;
  std::shared_ptr<lockstep::RowParallelLinear> proj_, down_;
};

/// The part of the model on one pipeline rank: its blocks and, on the first and last rank, a copy
/// of the table, which embeds tokens and scores them.
class Stage : public lockstep::DescribedModule {
 public:
  explicit Stage(const lockstep::ParallelContext& context) {
    using namespace lockstep;
    const ProcessGroup pipeline = context.state.group(GroupKind::pp);
    if (kBlocks % pipeline.size() != 0) throw std::invalid_argument("PIPELINE: allowed: 1, 2, 4");
    is_first_ = pipeline.rank() == 0;
    is_last_ = pipeline.rank() == pipeline.size() - 1;
    const TableUse use = pipeline.size() == 1 ? TableUse::both_ways : TableUse::other_stage;
    if (is_first_ || is_last_)
      table_ = add_child<VocabParallelEmbedding>(context, "table", kTokens, kWidth, 0.1, use);
    const int64_t blocks = kBlocks / pipeline.size();
    for (int64_t i = pipeline.rank() * blocks; i < (pipeline.rank() + 1) * blocks; ++i)
      blocks_.push_back(add_child<Block>(context, "block" + std::to_string(i)));
    if (is_last_) norm_ = add_child<Norm>(context, "norm", kWidth, Normalization::RMSNorm, 1e-5);
  }

  bool is_last() const { return is_last_; }

  /// `tokens` [batch, length + 1]; `hidden` from the stage before, undefined on the first -> the
  /// input of the next stage or, on the last stage, the sum of the tokens' losses.
  at::Tensor forward(const at::Tensor& tokens, at::Tensor hidden) const {
    if (is_first_) hidden = table_->embed(tokens.narrow(1, 0, kLength));
    for (const auto& block : blocks_) hidden = block->forward(hidden);
    if (!is_last_) return hidden;
    const at::Tensor labels = tokens.narrow(1, 1, kLength).t();
    return table_->cross_entropy(table_->logits(norm_->forward(hidden)), labels).sum();
  }

 private:
  bool is_first_ = true, is_last_ = true;
  std::shared_ptr<lockstep::VocabParallelEmbedding> table_;
  std::vector<std::shared_ptr<Block>> blocks_;
  std::shared_ptr<lockstep::Norm> norm_;
};

/// This rank's part of a micro-batch that is the same on every layout: [samples, length + 1] of
/// tokens, each of which determines the next.
at::Tensor make_batch(const lockstep::ProcessGroup& data_ranks, int64_t number) {
  if (kSamples % data_ranks.size() != 0)
    throw std::invalid_argument("data-parallel ranks: allowed: 1, 2, 4");
  const int64_t own = kSamples / data_ranks.size();
  at::Tensor token =
      (at::arange(own) + data_ranks.rank() * own + kSamples * number).remainder(kTokens);
  std::vector<at::Tensor> columns = {token};
  for (int64_t i = 0; i < kLength; ++i)
    columns.push_back(token = (token * 12 + 5).remainder(kTokens));
  return at::stack(columns, 1);
}

/// Weights and optimizer state: each tensor by its global name, with this rank's part of it.
std::vector<lockstep::StateTensor> state_of(const Stage& stage,
                                            const lockstep::Optimizer& optimizer,
                                            const lockstep::ParallelState& state) {
  std::vector<lockstep::StateTensor> tensors = lockstep::model_state(stage, state);
  for (lockstep::StateTensor& tensor : lockstep::optimizer_state(optimizer, state))
    tensors.push_back(std::move(tensor));
  return tensors;
}

void save(const std::string& folder, int64_t step, const Stage& stage,
          const lockstep::Optimizer& optimizer, const lockstep::ParallelState& state) {
  lockstep::CheckpointSaver saver(state, {.folder = folder});
  saver.save(state_of(stage, optimizer, state),
             {.iteration = step, .optimizer = optimizer.progress()}, lockstep::Config{});
}

/// Returns the step at which training resumes.
int64_t load(const std::string& folder, const Stage& stage, lockstep::Optimizer& optimizer,
             const lockstep::ParallelState& state) {
  lockstep::CheckpointReader checkpoint(folder);
  lockstep::check_no_weight_left(checkpoint, lockstep::model_state(stage, state), state);
  lockstep::load_state(checkpoint, state_of(stage, optimizer, state));
  optimizer.restore({.num_steps = checkpoint.manifest().optimizer_steps});
  optimizer.apply_master_weights();
  return checkpoint.manifest().iteration;
}

double train(int64_t tensor, int64_t pipeline, const std::string& action,
             const std::string& folder) {
  const lockstep::ParallelState state(lockstep::read_launch_environment(),
                                      {.sizes = {.tensor = tensor, .pipeline = pipeline}});
  Stage stage({.state = state, .options = at::kDouble, .sequence_parallel = tensor > 1});
  lockstep::DistributedDataParallel ddp(stage, state);
  ddp.set_num_microbatches(kMicrobatches);
  lockstep::OptimizerConfig config;
  config.lr = 0.01;
  lockstep::Optimizer optimizer({&ddp}, config);
  const lockstep::PipelineExecutor executor(
      state, lockstep::make_schedule({.pipeline = pipeline, .microbatches = kMicrobatches}));

  const auto data_ranks = state.group(lockstep::GroupKind::dp_cp);
  double mean_loss = 0;
  for (int64_t step = action == "load" ? load(folder, stage, optimizer, state) : 0; step < kSteps;
       ++step) {
    if (action == "save" && step == kSavedAt) save(folder, step, stage, optimizer, state);
    ddp.zero_grad();
    at::Tensor loss_sum = at::zeros({}, at::kDouble);  // stays 0 on all stages but the last
    executor.run({[&](int64_t microbatch, const at::Tensor& hidden) {
      const at::Tensor tokens = make_batch(data_ranks, step * kMicrobatches + microbatch);
      const at::Tensor output = stage.forward(tokens, hidden);
      if (stage.is_last()) loss_sum += output.detach();
      return output;
    }});
    const int64_t own_tokens = kMicrobatches * kSamples / data_ranks.size() * kLength;
    lockstep::finalize_model_grads({&ddp}, at::full({}, own_tokens));
    optimizer.step();

    for (const auto kind : {lockstep::GroupKind::dp_cp, lockstep::GroupKind::pp})
      lockstep::all_reduce(state.group(kind), loss_sum, lockstep::ReduceOp::sum, "loss").wait();
    mean_loss = loss_sum.item<double>() / (kMicrobatches * kSamples * kLength);
    if (state.rank() == 0) std::printf("step %2d  loss %.17g\n", static_cast<int>(step), mean_loss);
  }
  return mean_loss;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const int64_t tensor = argc > 2 ? std::atoi(argv[1]) : 1;
    const int64_t pipeline = argc > 2 ? std::atoi(argv[2]) : 1;
    constexpr double kGood = 1;  // the untrained model is at about 3.4
    const double loss = train(tensor, pipeline, argc > 4 ? argv[3] : "", argc > 4 ? argv[4] : "");
    return loss < kGood ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "own_model: %s\n", error.what());
    return 2;
  }
}
