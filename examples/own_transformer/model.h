#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/lockstep.h"

/// A gated convolution over token sequences in place of attention, and experts in place of the
/// feed-forward network. Channels and each expert are cut over tensor-parallel ranks, which may
/// split the sequence between them; experts are distributed over expert-parallel ranks, blocks over
/// pipeline ranks; the table that embeds tokens scores them too.
namespace own {

constexpr int64_t kTokens = 31, kWidth = 16, kInner = 24, kKernel = 3, kExperts = 4, kBlocks = 4,
                  kLength = 12;

/// Each channel sees itself and the kKernel - 1 tokens before it. Parameter: `weight` [channels,
/// kKernel], the channels cut over tp.
class CausalConvolution : public lockstep::DescribedModule {
 public:
  explicit CausalConvolution(const lockstep::ParallelContext& context) {
    using namespace lockstep;
    const ParamDescription description = {.placements = {{MeshAxis::tp, Shard{0}}}};
    weight_ = add({"weight", {kInner, kKernel}, NormalValues{0.4}, description}, context.origin());
  }

  /// [sequence, batch, channels / ranks] -> the same shape
  at::Tensor forward(const at::Tensor& x) const {
    const at::Tensor padded = at::constant_pad_nd(x.permute({1, 2, 0}), {kKernel - 1, 0});
    return at::conv1d(padded, weight_.unsqueeze(1), /*bias=*/{}, /*stride=*/1,
                      /*padding=*/at::IntArrayRef{0}, /*dilation=*/1, weight_.size(0))
        .permute({2, 0, 1});
  }

 private:
  at::Tensor weight_;
};

/// Each token takes the expert to which its gate gives the most. Parameters: `gate` [experts,
/// width]; `up` [experts, inner, width] and `down` [experts, width, inner], the experts cut over
/// ep, the inner features over etp, the tensor-parallel ranks of experts.
class Experts : public lockstep::DescribedModule {
 public:
  explicit Experts(const lockstep::ParallelContext& context)
      : tp_(context.tensor_parallel()),
        ep_(context.state.group(lockstep::GroupKind::ep)),
        sequence_parallel_(context.sequence_parallel) {
    using namespace lockstep;
    const ParamDescription of_gate = {
        .gradient_states = {{MeshAxis::tp, context.replicated_gradient_state()}}};
    gate_ = add({"gate", {kExperts, kWidth}, NormalValues{0.5}, of_gate}, context.origin());
    const auto cut = [](int64_t inner) {
      return ParamDescription{
          .placements = {{MeshAxis::ep, Shard{0}}, {MeshAxis::etp, Shard{inner}}},
          .is_expert = true};
    };
    up_ = add({"up", {kExperts, kInner, kWidth}, NormalValues{0.2}, cut(1)}, context.origin());
    down_ = add({"down", {kExperts, kWidth, kInner}, NormalValues{0.2}, cut(2)}, context.origin());
  }

  /// `hidden` as Block::forward. Ranks of ep have different samples: each runs its experts on the
  /// tokens of all of them.
  at::Tensor forward(const at::Tensor& hidden) const {
    using namespace lockstep;
    const at::Tensor scores = at::softmax(at::linear(hidden, gate_), -1);
    const at::Tensor gates = scores * scores.eq(scores.amax(-1, /*keepdim=*/true));
    at::Tensor all = at::cat({hidden, gates}, -1);
    all = sequence_parallel_ ? gather_from_group(all, tp_, 0, GradientState::partial_sum, "tokens")
                             : copy_to_group(all, tp_, "tokens");
    all = gather_from_group(all, ep_, 1, GradientState::partial_sum, "tokens");
    const at::Tensor tokens = all.narrow(-1, 0, kWidth);
    at::Tensor terms = at::zeros_like(tokens);
    for (int64_t i = 0; i < up_.size(0); ++i) {
      const at::Tensor gate = all.narrow(-1, kWidth + ep_.rank() * up_.size(0) + i, 1);
      terms = terms + gate * at::linear(at::silu(at::linear(tokens, up_[i])), down_[i]);
    }
    terms = reduce_scatter_to_group(terms, ep_, 1, "outputs");
    return sequence_parallel_ ? reduce_scatter_to_group(terms, tp_, 0, "outputs")
                              : reduce_from_group(terms, tp_, "outputs");
  }

 private:
  lockstep::ProcessGroup tp_, ep_;
  bool sequence_parallel_;
  at::Tensor gate_, up_, down_;
};

class Block : public lockstep::DescribedModule {
 public:
  explicit Block(const lockstep::ParallelContext& context) {
    using namespace lockstep;
    norm_ = add_child<Norm>(context, "norm", kWidth, Normalization::RMSNorm, 1e-5);
    in_ = add_child<ColumnParallelLinear>(context, "in", kWidth, std::vector<int64_t>{2, kInner},
                                          true, 0.2);
    convolution_ = add_child<CausalConvolution>(context, "convolution");
    out_ = add_child<RowParallelLinear>(context, "out", kInner, kWidth, true, 0.2);
    expert_norm_ = add_child<Norm>(context, "expert_norm", kWidth, Normalization::RMSNorm, 1e-5);
    experts_ = add_child<Experts>(context, "experts");
  }

  /// `hidden` [sequence, batch, width], with sequence parallelism this rank's part of the sequence
  at::Tensor forward(const at::Tensor& hidden) const {
    const std::vector<at::Tensor> parts = in_->forward(norm_->forward(hidden)).chunk(2, -1);
    const at::Tensor mixed =
        hidden + out_->forward(at::silu(parts[0]) * convolution_->forward(parts[1]));
    return mixed + experts_->forward(expert_norm_->forward(mixed));
  }

 private:
  std::shared_ptr<lockstep::Norm> norm_, expert_norm_;
  std::shared_ptr<lockstep::ColumnParallelLinear> in_;
  std::shared_ptr<CausalConvolution> convolution_;
  std::shared_ptr<lockstep::RowParallelLinear> out_;
  std::shared_ptr<Experts> experts_;
};

/// The part of the model on one pipeline rank.
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
      table_ = add_child<VocabParallelEmbedding>(context, "table", kTokens, kWidth, 0.2, use);
    const int64_t blocks = kBlocks / pipeline.size();
    for (int64_t i = pipeline.rank() * blocks; i < (pipeline.rank() + 1) * blocks; ++i)
      blocks_.push_back(add_child<Block>(context, "block" + std::to_string(i)));
    if (is_last_) norm_ = add_child<Norm>(context, "norm", kWidth, Normalization::RMSNorm, 1e-5);
  }

  bool is_last() const { return is_last_; }

  /// `tokens` [batch, length + 1]; `hidden` from the stage before, undefined on the first -> what
  /// the next stage takes, or on the last one the sum of the tokens' losses.
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

/// This rank's part of micro-batch `number`, which is the same on every layout: [samples, length +
/// 1] of tokens, each of which determines the next.
inline at::Tensor make_batch(const lockstep::ProcessGroup& data_ranks, int64_t number) {
  constexpr int64_t kSamples = 4;
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

/// p -= lr * (m / (|m| + epsilon) + weight_decay * p) with m = beta m + (1 - beta) g: steps of
/// nearly one length, whatever the gradient's.
struct SoftSign : lockstep::UpdateRule {
  static constexpr double kBeta = 0.9, kEpsilon = 1e-3;
  SoftSign()
      : UpdateRule({.name = "soft_sign",
                    .settings = "beta 0.9, epsilon 0.001",
                    .state = {{"momentum", lockstep::StateDtype::fp32}}}) {}
  void update(const lockstep::UpdateRange& all) const override {
    for (const auto& segment : all.segments) {
      const lockstep::UpdateRange range = all.part(segment);
      const at::Tensor momentum = range.state[0].lerp(range.gradient(), 1 - kBeta);
      const at::Tensor step = momentum / (momentum.abs() + kEpsilon);
      range.write(range.state[0], momentum);
      range.write_weights(range.weights * (1 - range.learning_rate * range.weight_decay) -
                          range.learning_rate * step);
    }
  }
};

inline lockstep::OptimizerConfig optimizer_config() {
  lockstep::OptimizerConfig config;
  config.lr = 0.01;
  config.clip_grad = 1;
  return config;
}

}  // namespace own
