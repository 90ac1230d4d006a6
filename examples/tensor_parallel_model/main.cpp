// A tensor-parallel model of one's own, with sequence parallelism: an embedding, a feed-forward
// network and a norm learn which token follows which. The loss is the same on every layout.
//
// Run alone, or with TENSOR ranks that split each matrix:
//   torchrun --no-python --nproc-per-node 2 ./tensor_parallel_model 2

#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include <ATen/ATen.h>

#include "lockstep/lockstep.h"

namespace {

constexpr int64_t kTokens = 31, kWidth = 32, kInner = 64, kLength = 16, kSamples = 8, kSteps = 150;

// [snippet]
class Model : public lockstep::DescribedModule {
 public:
  explicit Model(const lockstep::ParallelContext& context) {
    using namespace lockstep;
    table_ = add_child<VocabParallelEmbedding>(context, "table", kTokens, kWidth, 0.1,
                                               TableUse::both_ways);
    inner_ = add_child<ColumnParallelLinear>(context, "inner", kWidth, kInner, true, 0.1);
    outer_ = add_child<RowParallelLinear>(context, "outer", kInner, kWidth, true, 0.1);
    norm_ = add_child<Norm>(context, "norm", kWidth, Normalization::LayerNorm, 1e-5);
  }

  /// `tokens` and `labels` [batch, sequence] -> the sum of the tokens' losses.
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& labels) const {
    const at::Tensor hidden = table_->embed(tokens);
    const at::Tensor mixed = hidden + outer_->forward(at::gelu(inner_->forward(hidden)));
    return table_->cross_entropy(table_->logits(norm_->forward(mixed)), labels.t()).sum();
  }

 private:
  std::shared_ptr<lockstep::VocabParallelEmbedding> table_;
  std::shared_ptr<lockstep::ColumnParallelLinear> inner_;
  std::shared_ptr<lockstep::RowParallelLinear> outer_;
  std::shared_ptr<lockstep::Norm> norm_;
};
// [snippet]

/// This rank's part of the batch of a step, which is the same on every layout: [samples, length +
/// 1] of tokens, each of which determines the next.
at::Tensor make_batch(const lockstep::ProcessGroup& data_ranks, int64_t step) {
  if (kSamples % data_ranks.size() != 0)
    throw std::invalid_argument("data-parallel ranks: allowed: 1, 2, 4, 8");
  const int64_t own = kSamples / data_ranks.size();
  at::Tensor token =
      (at::arange(own) + data_ranks.rank() * own + kSamples * step).remainder(kTokens);
  std::vector<at::Tensor> columns = {token};
  for (int64_t i = 0; i < kLength; ++i)
    columns.push_back(token = (token * 12 + 5).remainder(kTokens));
  return at::stack(columns, 1);
}

double train(int64_t tensor) {
  const lockstep::ParallelState state(lockstep::read_launch_environment(),
                                      {.sizes = {.tensor = tensor}});
  Model model({.state = state, .sequence_parallel = tensor > 1});
  lockstep::DistributedDataParallel ddp(model, state);
  lockstep::OptimizerConfig config;
  config.lr = 0.01;
  config.clip_grad = 1;
  lockstep::Optimizer optimizer({&ddp}, config);

  const auto data_ranks = state.group(lockstep::GroupKind::dp_cp);
  double mean_loss = 0;
  for (int64_t step = 0; step < kSteps; ++step) {
    const at::Tensor batch = make_batch(data_ranks, step);
    ddp.zero_grad();
    at::Tensor loss =
        model.forward(batch.narrow(1, 0, kLength).contiguous(), batch.narrow(1, 1, kLength));
    loss.backward();
    const auto report =
        lockstep::finalize_model_grads({&ddp}, at::full({}, batch.size(0) * kLength));
    optimizer.step();

    at::Tensor loss_sum = loss.detach().clone();
    lockstep::all_reduce(data_ranks, loss_sum, lockstep::ReduceOp::sum, "loss").wait();
    mean_loss = (loss_sum / report.num_tokens).item<double>();
    if (state.rank() == 0 && (step % 25 == 0 || step == kSteps - 1))
      std::printf("step %3d  loss %.5f\n", static_cast<int>(step), mean_loss);
  }
  return mean_loss;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    constexpr double kGood = 0.1;  // the untrained model is at about 3.4
    return train(argc > 1 ? std::atoi(argv[1]) : 1) < kGood ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tensor_parallel_model: %s\n", error.what());
    return 2;
  }
}
