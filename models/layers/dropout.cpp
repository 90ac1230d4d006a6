#include "lockstep/models/dropout.h"

#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/check.h"
#include "lockstep/core/philox.h"
#include "lockstep/kernels/dropout.h"

namespace lockstep {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct DroppedPlaces : torch::CustomClassHolder {
  DroppedPlaces(double share, kernels::RandomPlaces of_elements)
      : probability(share), places(std::move(of_elements)) {}

  double probability;
  kernels::RandomPlaces places;
};

using Dropped = c10::intrusive_ptr<DroppedPlaces>;

/// (x, residual or nothing) -> their sum, with dropout of `x`
struct DropoutFunction : torch::autograd::Function<DropoutFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            const std::optional<at::Tensor>& residual, const Dropped& dropped) {
    context->saved_data["dropped"] = c10::IValue::make_capsule(dropped);
    context->saved_data["adds"] = residual.has_value();
    return kernels::dropout(x, residual.value_or(at::Tensor()), dropped->probability,
                            dropped->places);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto dropped = c10::static_intrusive_pointer_cast<DroppedPlaces>(
        context->saved_data["dropped"].toCapsule());
    const bool adds = context->saved_data["adds"].toBool();
    const at::Tensor of_x = context->needs_input_grad(0)
                                ? DropoutFunction::apply(grads[0], std::nullopt, dropped)
                                : at::Tensor();
    return {of_x, adds ? grads[0] : at::Tensor(), {}};
  }
};

}  // namespace

SequenceChunk SequenceChunk::of(const ParallelContext& context) {
  if (!context.sequence_parallel) return {};
  const ProcessGroup group = context.tensor_parallel();
  return {group.rank(), group.size()};
}

at::Tensor SequenceChunk::positions(const TokenPositions& tokens, int64_t rows,
                                    c10::Device device) const {
  if (!tokens.positions.defined()) return {};
  return tokens.positions.narrow(0, index * rows, rows).to(device);
}

Dropout::Dropout(const LayerContext& context, double probability)
    : Dropout(context, probability, SequenceChunk::of(context)) {}

Dropout::Dropout(const ParallelContext& context, double probability, const SequenceChunk& chunk)
    : probability_(probability), chunk_(chunk) {
  require<UsageError>(probability >= 0 && probability < 1,
                      "{}: dropout: found a probability of {}, allowed: >= 0 and < 1", context.name,
                      probability);
  const uint64_t key = CounterStream(context.seed, context.name).bits(0);
  key_ = {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

at::Tensor Dropout::run(const at::Tensor& x, const std::optional<at::Tensor>& residual,
                        const TokenPositions& tokens, kernels::RandomPlaces places) const {
  places.key = key_;
  places.first_sample = tokens.first_sample;
  places.sample_on_device = tokens.first_sample_on_device;
  return DropoutFunction::apply(x, residual,
                                c10::make_intrusive<DroppedPlaces>(probability_, places));
}

kernels::RandomPlaces Dropout::places_of_tokens(const at::Tensor& x, const TokenPositions& tokens,
                                                int64_t first_channel) const {
  const int64_t sequence = x.size(0), batch = x.size(1);
  return {.sample = {1, batch},
          .position = {batch, sequence},
          .first_position = chunk_.index * sequence,
          .first_channel = first_channel,
          .positions = chunk_.positions(tokens, sequence, x.device())};
}

at::Tensor Dropout::apply(const at::Tensor& x, const TokenPositions& tokens, bool training) const {
  return apply_to_channels(x, tokens, 0, training);
}

at::Tensor Dropout::add(const at::Tensor& x, const at::Tensor& residual,
                        const TokenPositions& tokens, bool training) const {
  if (!training || probability_ == 0) return residual + x;
  return run(x, residual, tokens, places_of_tokens(x, tokens, 0));
}

at::Tensor Dropout::apply_to_channels(const at::Tensor& x, const TokenPositions& tokens,
                                      int64_t first, bool training) const {
  if (!training || probability_ == 0) return x;
  return run(x, std::nullopt, tokens, places_of_tokens(x, tokens, first));
}

at::Tensor Dropout::apply_to_attention(const at::Tensor& x, const TokenPositions& tokens,
                                       int64_t first_head, bool training) const {
  if (!training || probability_ == 0) return x;
  const int64_t batch = x.size(0), heads = x.size(1), queries = x.size(2);
  return run(x, std::nullopt, tokens,
             {.sample = {heads * queries, batch},
              .position = {1, queries},
              .lane = {queries, heads},
              .first_lane = first_head,
              .positions = SequenceChunk().positions(tokens, queries, x.device())});
}

}  // namespace lockstep
