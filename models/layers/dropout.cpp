#include "lockstep/models/dropout.h"

#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/philox.h"

namespace lockstep {
namespace {

constexpr int64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr int64_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
constexpr int64_t kWord = 0xFFFFFFFF;

at::Tensor low(const at::Tensor& x) { return x.bitwise_and(kWord); }
at::Tensor high(const at::Tensor& x) { return low(x.bitwise_right_shift(32)); }

at::Tensor numbers(int64_t first, int64_t count, const at::Tensor& like) {
  return at::arange(first, first + count, like.options().dtype(at::kLong));
}

/// The numbers of the `count` samples of a micro-batch.
at::Tensor samples_of(const TokenPositions& tokens, int64_t count, const at::Tensor& like) {
  if (!tokens.first_sample_on_device.defined()) return numbers(tokens.first_sample, count, like);
  return numbers(0, count, like) + tokens.first_sample_on_device;
}

}  // namespace

SequenceChunk SequenceChunk::of(const ParallelContext& context) {
  if (!context.sequence_parallel) return {};
  const ProcessGroup group = context.tensor_parallel();
  return {group.rank(), group.size()};
}

at::Tensor SequenceChunk::positions(const TokenPositions& tokens, int64_t rows,
                                    c10::Device device) const {
  if (tokens.positions.defined()) return tokens.positions.narrow(0, index * rows, rows).to(device);
  return at::arange(index * rows, (index + 1) * rows, at::TensorOptions(device).dtype(at::kLong));
}

RandomField::RandomField(uint64_t seed, const std::string& name) {
  const uint64_t bits = CounterStream(seed, name).bits(0);
  key_ = {static_cast<int64_t>(bits & kWord), static_cast<int64_t>(bits >> 32)};
}

at::Tensor RandomField::words(const at::Tensor& positions, int64_t first_sample, int64_t samples,
                              int64_t count, int64_t lane) const {
  return words(positions, numbers(first_sample, samples, positions), count, lane);
}

at::Tensor RandomField::words(const at::Tensor& positions, const at::Tensor& samples, int64_t count,
                              int64_t lane) const {
  const int64_t blocks = (count + 3) / 4;
  const at::Tensor sample = samples.view({1, -1, 1});
  at::Tensor c0 = numbers(0, blocks, positions).view({1, 1, -1});
  at::Tensor c1 = positions.view({-1, 1, 1});
  at::Tensor c2 = low(sample);
  at::Tensor c3 = (high(sample) * (1 << 16) + lane).bitwise_and(kWord);
  int64_t k0 = key_[0], k1 = key_[1];
  for (int round = 0; round < 10; ++round) {
    // Products of two 32-bit words fill all 64 bits of the int64.
    const at::Tensor a = c0 * kMultiplier0, b = c2 * kMultiplier1;
    c0 = high(b).bitwise_xor(c1).bitwise_xor(k0);
    c2 = high(a).bitwise_xor(c3).bitwise_xor(k1);
    c1 = low(b);
    c3 = low(a);
    k0 = (k0 + kWeyl0) & kWord;
    k1 = (k1 + kWeyl1) & kWord;
  }
  const auto all = at::broadcast_tensors({c0, c1, c2, c3});
  return at::stack(all, -1).flatten(2).narrow(2, 0, count);
}

Dropout::Dropout(const LayerContext& context, double probability)
    : Dropout(context, probability, SequenceChunk::of(context)) {}

Dropout::Dropout(const ParallelContext& context, double probability, const SequenceChunk& chunk)
    : probability_(probability), chunk_(chunk), field_(context.seed, context.name) {
  require<UsageError>(probability >= 0 && probability < 1,
                      "{}: dropout: found a share of {}, allowed: >= 0 and < 1", context.name,
                      probability);
}

at::Tensor Dropout::keep(const at::Tensor& x, const at::Tensor& words) const {
  const auto threshold = static_cast<int64_t>(std::llround(probability_ * 0x1p32));
  return (x * words.ge(threshold)) * (1 / (1 - probability_));
}

at::Tensor Dropout::apply(const at::Tensor& x, const TokenPositions& tokens, bool training) const {
  return apply_to_channels(x, tokens, 0, x.size(2), training);
}

at::Tensor Dropout::apply_to_channels(const at::Tensor& x, const TokenPositions& tokens,
                                      int64_t first, int64_t channels, bool training) const {
  if (!training || probability_ == 0) return x;
  const at::Tensor positions = chunk_.positions(tokens, x.size(0), x.device());
  const at::Tensor words =
      field_.words(positions, samples_of(tokens, x.size(1), positions), channels, /*lane=*/0);
  return keep(x, words.narrow(2, first, x.size(2)));
}

at::Tensor Dropout::apply_to_attention(const at::Tensor& x, const TokenPositions& tokens,
                                       int64_t first_head, bool training) const {
  if (!training || probability_ == 0) return x;
  const at::Tensor positions = SequenceChunk{}.positions(tokens, x.size(2), x.device());
  const at::Tensor samples = samples_of(tokens, x.size(0), positions);
  std::vector<at::Tensor> heads;
  for (int64_t head = 0; head < x.size(1); ++head)
    heads.push_back(field_.words(positions, samples, x.size(3), first_head + head).transpose(0, 1));
  return keep(x, at::stack(heads, 1));
}

}  // namespace lockstep
