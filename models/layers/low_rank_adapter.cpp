#include "lockstep/models/low_rank_adapter.h"

#include <utility>

#include <ATen/ATen.h>

#include "lockstep/models/linear.h"

namespace lockstep {
namespace {

double scale_of(const LoraConfig& lora) {
  return lora.alpha / static_cast<double>(lora.rank.value());
}

ParallelLinearOptions options_of(const ParallelContext& context, LinearInput input,
                                 LinearOutput output = LinearOutput::own) {
  return {.group = context.tensor_parallel(),
          .input = input,
          .output = output,
          .deferred = context.deferred,
          .label = context.label()};
}

}  // namespace

LowRankAdapter::LowRankAdapter(const ParallelContext& context, at::Tensor a, at::Tensor b,
                               Beside beside)
    : beside_(beside),
      scale_(scale_of(context.lora)),
      of_a_(options_of(context.child("lora_A"), LinearInput::own,
                       beside == Beside::rows ? row_parallel_output(context) : LinearOutput::own)),
      of_b_(options_of(context.child("lora_B"), beside == Beside::columns
                                                    ? column_parallel_input(context)
                                                    : LinearInput::own)),
      a_(std::move(a)),
      b_(std::move(b)),
      dropout_(context.child("lora_dropout"), context.lora.dropout,
               beside == Beside::columns ? SequenceChunk::of(context) : SequenceChunk()) {}

at::Tensor LowRankAdapter::forward(const at::Tensor& input, const TokenPositions& tokens,
                                   bool training) const {
  const at::Tensor low = parallel_linear(dropped(input, tokens, training), a_, {}, of_a_);
  return parallel_linear(low * scale_, b_, {}, of_b_);
}

at::Tensor LowRankAdapter::dropped(const at::Tensor& input, const TokenPositions& tokens,
                                   bool training) const {
  const int64_t part = input.size(-1);
  if (beside_ == Beside::columns) return dropout_.apply(input, tokens, training);
  return dropout_.apply_to_channels(input, tokens, of_a_.group.rank() * part, training);
}

at::Tensor merged_weight(const at::Tensor& weight, const at::Tensor& a, const at::Tensor& b,
                         const LoraConfig& lora) {
  const at::Tensor product =
      b.flatten(0, -2).to(weight.scalar_type()).mm(a.to(weight.scalar_type()));
  return at::add(weight, product.view(weight.sizes()), scale_of(lora));
}

}  // namespace lockstep
