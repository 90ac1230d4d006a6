// A rank that trains a small GPT on tokens from a formula. Rank 0 writes the values that
// megatron_test.py compares: initial weights, the gradients of the first step, and all losses.
// Usage: gpt_steps FILE.

#include <cstdio>
#include <fstream>
#include <iostream>

#include <ATen/ATen.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

constexpr int64_t kSteps = 10, kBatch = 4, kSequence = 32;

TransformerConfig small_model() {
  TransformerConfig model;
  model.num_layers = 2;
  model.hidden_size = 64;
  model.num_attention_heads = 4;
  model.num_query_groups = 2;
  model.ffn_hidden_size = 96;
  model.seq_length = kSequence;
  model.vocab_size = 128;
  model.init_method_std = 0.1;
  return model;
}

/// [kBatch, kSequence + 1], as in megatron_gpt.py.
at::Tensor tokens_of(int64_t step, const ParallelState& state) {
  const int64_t first = (step * state.world_size() + state.rank()) * kBatch * (kSequence + 1);
  const at::Tensor i = at::arange(first, first + kBatch * (kSequence + 1), at::kLong);
  return ((i * i * 7 + i.div(3, "floor") * 11 + 5) % 128).view({kBatch, kSequence + 1});
}

using Tensors = c10::Dict<std::string, at::Tensor>;

void run(const std::string& path) {
  const ParallelState state(read_launch_environment(), ParallelStateOptions{});
  GPTModel model(small_model(), GPTModelOptions{});
  DistributedDataParallel ddp(model, state);
  OptimizerConfig config;
  config.lr = 0.003;
  config.clip_grad = 1;
  const auto optimizer = make_optimizer({&ddp}, config);
  Tensors result;
  for (const auto& param : model.named_parameters())
    result.insert("weight " + param.key(), param.value().detach().clone());
  at::Tensor losses = at::zeros({kSteps}, at::kDouble), norms = at::zeros({kSteps}, at::kDouble);
  for (int64_t step = 0; step < kSteps; ++step) {
    ddp.zero_grad_buffer();
    const at::Tensor tokens = tokens_of(step, state);
    const at::Tensor loss = model.forward(tokens.slice(1, 0, kSequence), tokens.slice(1, 1)).sum();
    loss.backward();
    finalize_model_grads({&ddp}, at::full({}, kBatch * kSequence));
    losses[step] = loss.detach().to(at::kDouble);
    if (step == 0)
      for (const auto& param : model.named_parameters())
        result.insert("gradient " + param.key(), param.value().grad().clone());
    norms[step] = optimizer->step().grad_norm;
  }
  all_reduce(state.world(), losses, ReduceOp::sum, "losses").wait();
  result.insert("losses", losses / (state.world_size() * kBatch * kSequence));
  result.insert("norms", norms);
  if (state.rank() != 0) return;
  const std::vector<char> bytes = torch::jit::pickle_save(result);
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  try {
    lockstep::run(argc > 1 ? argv[1] : "gpt_steps.pt");
    return 0;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
