// Dropout compared bit by bit with core/'s Philox and libtorch's operators: every dtype, rows of
// any width that start at any channel, unaligned starts.

#include "lockstep/kernels/dropout.h"

#include <gtest/gtest.h>

#include <limits>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "lockstep/core/error.h"
#include "lockstep/core/philox.h"
#include "lockstep/tests/kernels/layer_inputs.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep::kernels {
namespace {

using testing::throws_with;

constexpr double kShare = 0.3;
constexpr int64_t kFarSample = (int64_t{5} << 32) + 0xFFFFFFFE;  // the next two cross 2^32

int64_t index_of(const RowAxis& axis, int64_t row) { return row / axis.stride % axis.count; }

/// [rows, width]: 1 for elements that are kept.
at::Tensor kept_by_philox(int64_t rows, int64_t width, const RandomPlaces& p) {
  at::Tensor kept = at::empty({rows, width}, at::kDouble);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t place = index_of(p.position, row);
    const int64_t position =
        p.positions.defined() ? p.positions[place].item<int64_t>() : p.first_position + place;
    const auto sample = static_cast<uint64_t>(
        index_of(p.sample, row) +
        (p.sample_on_device.defined() ? p.sample_on_device.item<int64_t>() : p.first_sample));
    const auto lane = static_cast<uint32_t>(p.first_lane + index_of(p.lane, row));
    for (int64_t i = 0; i < width; ++i) {
      const int64_t channel = p.first_channel + i;
      const auto block = philox4x32(
          {static_cast<uint32_t>(channel / 4), static_cast<uint32_t>(position),
           static_cast<uint32_t>(sample), static_cast<uint32_t>(sample >> 32 << 16) + lane},
          p.key);
      kept[row][i] = block[static_cast<size_t>(channel % 4)] >= kShare * 0x1p32 ? 1.0 : 0.0;
    }
  }
  return kept;
}

/// Dropout of `x` [..., width] by separate operators.
at::Tensor plain_dropout(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& kept) {
  const at::Tensor dropped = (x * kept.view(x.sizes()).to(at::kBool)) * (1 / (1 - kShare));
  return residual.defined() ? residual + dropped : dropped;
}

void expect_bits(const at::Tensor& x, const at::Tensor& residual, const RandomPlaces& places) {
  const int64_t width = x.size(-1);
  const at::Tensor kept = kept_by_philox(x.numel() / width, width, places);
  for (const at::Tensor& added : {at::Tensor(), residual})
    EXPECT_TRUE(at::equal(dropout(x, added, kShare, places), plain_dropout(x, added, kept)))
        << at::toString(x.scalar_type()) << " " << x.sizes() << " from channel "
        << places.first_channel << (added.defined() ? " with a residual" : "");
}

TEST(DropoutKernel, IsThatOfPhiloxForTokens) {
  for (const auto dtype : kDtypes)
    for (const int64_t width : {1, 6, 64, 259, 1030})
      for (const int64_t first_channel : {0, 3, 64, 1021}) {
        const at::Tensor x = wave_of({3, 4, width}, 0.1, dtype);
        const at::Tensor residual = wave_of({3, 4, width}, 0.9, dtype);
        const RandomPlaces places = {.key = {0x12345678, 0xFEDCBA98},
                                     .sample = {1, 4},
                                     .position = {4, 3},
                                     .first_sample = kFarSample,
                                     .first_position = 5,
                                     .first_channel = first_channel};
        expect_bits(x, residual, places);
        expect_bits(misaligned(x), misaligned(residual), places);
        expect_bits(x.transpose(0, 1).contiguous().transpose(0, 1), residual, places);
      }
}

TEST(DropoutKernel, TakesPositionsAndTheSampleFromTensors) {
  const RandomPlaces places = {.key = {7, 8},
                               .sample = {1, 2},
                               .position = {2, 3},
                               .first_sample = 1,
                               .sample_on_device = at::scalar_tensor(kFarSample, at::kLong),
                               .positions = at::tensor({0, 7, 123456}, at::kLong)};
  for (const auto dtype : kDtypes)
    expect_bits(wave_of({3, 2, 10}, 0.1, dtype), wave_of({3, 2, 10}, 0.9, dtype), places);
}

TEST(DropoutKernel, DistinguishesTheHeadsOfAttentionWeights) {
  const RandomPlaces places = {.key = {7, 8},
                               .sample = {3 * 5, 2},
                               .position = {1, 5},
                               .lane = {5, 3},
                               .first_sample = kFarSample,
                               .first_lane = 2};
  for (const auto dtype : kDtypes)
    expect_bits(wave_of({2, 3, 5, 7}, 0.1, dtype), wave_of({2, 3, 5, 7}, 0.9, dtype), places);
}

TEST(DropoutKernel, DoesNotDependOnTheNumberOfThreads) {
  const at::Tensor x = wave_of({64, 8, 515}, 0.1, at::kFloat);
  const RandomPlaces places = {.sample = {1, 8}, .position = {8, 64}};
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const at::Tensor one = dropout(x, {}, kShare, places);
  at::set_num_threads(2);
  EXPECT_TRUE(at::equal(dropout(x, {}, kShare, places), one));
  at::set_num_threads(threads);
}

TEST(DropoutKernel, TakesAnyShareAndNoElements) {
  const at::Tensor x = at::ones({4, 1000}, at::kDouble);
  const RandomPlaces places = {.position = {1, 4}};
  EXPECT_TRUE(at::equal(dropout(x, {}, 0, places), x));
  EXPECT_EQ(dropout(x, {}, 1 - 1e-12, places).count_nonzero().item<int64_t>(), 0);
  EXPECT_NEAR(dropout(x, {}, 0.75, places).mean().item<double>(), 1, 0.1);
  EXPECT_EQ(dropout(at::ones({0, 3}), {}, 0.5, places).numel(), 0);
  EXPECT_EQ(dropout(at::ones({3, 0}), {}, 0.5, places).numel(), 0);
}

TEST(DropoutKernel, ShowsWhatIsNotFinite) {
  const at::Tensor x = at::full({1, 64}, std::numeric_limits<double>::infinity());
  const at::Tensor y = dropout(x, {}, 0.5, {});
  EXPECT_TRUE(y.isnan().logical_or(y.isinf()).all().item<bool>());
}

TEST(DropoutKernel, NamesWhatItDoesNotTake) {
  const at::Tensor x = at::ones({2, 4});
  EXPECT_TRUE(throws_with<UsageError>([&] { dropout(x.to(at::kLong), {}, 0.5, {}); },
                                      "dropout: found tensors of Long, allowed: Float"));
  EXPECT_TRUE(throws_with<UsageError>([&] { dropout(x, {}, 1, {}); },
                                      "dropout: found a probability of 1, allowed: >= 0 and < 1"));
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        dropout(x, at::ones({2, 3}), 0.5, {});
      },
      "dropout: found a residual [2, 3] of Float on cpu, allowed: [2, 4] of Float on cpu"));
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        dropout(x, at::empty({2, 4}, at::kMeta), 0.5, {});
      },
      "dropout: found a residual [2, 4] of Float on meta, allowed: [2, 4] of Float on cpu"));
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        dropout(x, {}, 0.5, {.position = {1, 2}, .positions = at::arange(3)});
      },
      "dropout: found 3 positions of Long on cpu, allowed: 2 of Long on cpu"));
  EXPECT_TRUE(throws_with<UsageError>(
      [&] { dropout(x, {}, 0.5, {.sample_on_device = at::ones({})}); },
      "dropout: found 1 samples of Float on cpu, allowed: 1 of Long on cpu"));
}

}  // namespace
}  // namespace lockstep::kernels
