// Layer kernels compared with the CPU's, forward and backward.

#include <limits>
#include <vector>

#include "lockstep/kernels/cross_entropy.h"
#include "lockstep/kernels/dropout.h"
#include "lockstep/kernels/fp8.h"
#include "lockstep/kernels/norm.h"
#include "lockstep/kernels/rotary.h"
#include "lockstep/kernels/swiglu.h"
#include "lockstep/tests/gpu/cuda_fixture.h"

namespace lockstep::testing {
namespace {

using Results = std::vector<at::Tensor>;

const auto kLayerDtypes = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};

/// One rounding of the largest value; several in fp32 and fp64.
double layer_tolerance(at::ScalarType dtype) {
  if (dtype == at::kDouble) return 1e-13;
  return dtype == at::kFloat ? 1e-5 : 0.01;
}

at::Tensor wave_on(c10::Device device, at::IntArrayRef shape, double speed, at::ScalarType dtype) {
  return wave(c10::multiply_integers(shape), speed, dtype).view(shape).to(device);
}

void expect_same(const Results& found, const Results& expected, at::ScalarType dtype) {
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_LT(relative_distance(found[i], expected[i]), layer_tolerance(dtype))
        << "result " << i << ", " << at::toString(dtype);
}

Results norm_results(c10::Device device, kernels::NormKind kind, int64_t width,
                     at::ScalarType dtype) {
  const auto input = [&](double speed) { return wave_on(device, {1000, width}, speed, dtype); };
  const at::Tensor weight = wave_on(device, {width}, 0.4, dtype);
  const kernels::NormResult result =
      kernels::norm_forward(kind, input(0.3), input(0.7), weight, weight, 1e-5);
  const kernels::NormGradients gradients =
      kernels::norm_backward(kind, input(0.2), input(0.9), result, weight, true);
  Results all = {result.sum, result.normalized, result.root, gradients.input, gradients.weight};
  if (gradients.bias.defined()) all.push_back(gradients.bias);
  return all;
}

TEST(LayerKernels, NormsEqualTheCpu) {
  for (const auto kind : {kernels::NormKind::rms, kernels::NormKind::layer})
    for (const auto dtype : kLayerDtypes)
      // The sums of the last three fill shared memory, or exceed it.
      for (const int64_t width : {33, 4096, 6144, 12288, 13000}) {
        const Results cpu = norm_results(at::kCPU, kind, width, dtype);
        LOCKSTEP_NEEDS_CUDA();
        expect_same(norm_results(kCuda, kind, width, dtype), cpu, dtype);
      }
}

TEST(LayerKernels, SwigluEqualsTheCpu) {
  for (const auto dtype : kLayerDtypes) {
    const auto results = [&](c10::Device device) -> Results {
      const at::Tensor inner = wave_on(device, {300, 2 * 513}, 0.3, dtype) * 5;
      const at::Tensor grad = wave_on(device, {300, 513}, 0.7, dtype);
      return {kernels::swiglu(inner), kernels::swiglu_backward(grad, inner)};
    };
    const Results cpu = results(at::kCPU);
    LOCKSTEP_NEEDS_CUDA();
    expect_same(results(kCuda), cpu, dtype);
  }
}

TEST(LayerKernels, DropoutEqualsTheCpu) {
  for (const auto dtype : kLayerDtypes)
    for (const int64_t width : {1, 33, 64, 4096})
      for (const int64_t first_channel : {0, 6, 64}) {
        const auto results = [&](c10::Device device) -> Results {
          const at::Tensor x = wave_on(device, {100, 3, width}, 0.3, dtype);
          const at::Tensor residual = wave_on(device, {100, 3, width}, 0.7, dtype);
          const kernels::RandomPlaces places = {
              .key = {7, 8},
              .sample = {1, 3},
              .position = {3, 100},
              .lane = {1, 3},
              .first_channel = first_channel,
              .sample_on_device = at::scalar_tensor(int64_t{1} << 40, at::kLong).to(device),
              .positions = at::arange(99, -1, -1, at::kLong).to(device)};
          return {kernels::dropout(x, residual, 0.3, places), kernels::dropout(x, {}, 0.3, places)};
        };
        const Results cpu = results(at::kCPU);
        LOCKSTEP_NEEDS_CUDA();
        const Results cuda = results(kCuda);
        for (size_t i = 0; i < cpu.size(); ++i)  // each operation rounds once, so no bit differs
          EXPECT_TRUE(at::equal(cuda[i].cpu(), cpu[i])) << dtype << " width " << width;
      }
}

TEST(LayerKernels, MatricesOf8BitsAreThoseOfTheCpu) {
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf})
    for (const auto format : {at::kFloat8_e4m3fn, at::kFloat8_e5m2})
      for (const auto& [rows, width] : {std::pair{16, 16}, {80, 208}, {512, 1024}, {33, 48}}) {
        const auto results = [&](c10::Device device) -> Results {
          const at::Tensor x = wave_on(device, {rows, width}, 0.3, dtype) * 3;
          x[1][5].fill_(std::numeric_limits<float>::infinity());
          x[2][7].fill_(std::numeric_limits<double>::quiet_NaN());
          Results all;
          for (const double factor : {1.0, 300.0}) {
            const at::Tensor scale = at::full({1, 1}, factor, at::kFloat).to(device);
            at::Tensor largest = at::full({1, 1}, 2.5, at::kFloat).to(device);
            const auto both =
                kernels::to_fp8_matrices(x.narrow(0, 3, rows - 3).contiguous(), format, scale,
                                         kernels::Fp8Sides::both, largest);
            const auto whole =
                kernels::to_fp8_matrices(x, format, scale, kernels::Fp8Sides::both, largest);
            for (const auto& part : {both, whole})
              for (const auto& side : {part.matrix, part.transposed}) {
                const at::Tensor codes = side.values.view(at::kByte).cpu();
                all.push_back(codes.masked_fill(codes.eq(0xff), 0x7f));  // NaN of either sign
              }
            all.push_back(largest.cpu());
          }
          using kernels::Fp8Sides;
          const at::Tensor whole = wave_on(device, {rows, width}, 0.7, dtype);
          const at::Tensor of_rows =
              kernels::fp8_scale(kernels::largest_absolute_of_rows(whole), format);
          const at::Tensor of_columns =
              kernels::fp8_scale(kernels::largest_absolute_of_columns(whole), format);
          const auto matrix = kernels::to_fp8_matrices(whole, format, of_rows, Fp8Sides::matrix);
          const auto turned =
              kernels::to_fp8_matrices(whole, format, of_columns, Fp8Sides::transposed);
          all.push_back(matrix.matrix.values.view(at::kByte).cpu());
          all.push_back(turned.transposed.values.view(at::kByte).cpu());
          return all;
        };
        const Results cpu = results(at::kCPU);
        LOCKSTEP_NEEDS_CUDA();
        const Results cuda = results(kCuda);
        for (size_t i = 0; i < cpu.size(); ++i)
          EXPECT_TRUE(at::equal(cuda[i].nan_to_num(-1), cpu[i].nan_to_num(-1))) << i;
      }
}

TEST(LayerKernels, ProductsOf8BitsEqualTheCpu) {
  using kernels::Fp8Matrix;
  for (const bool rows : {false, true})
    for (const auto format : {at::kFloat8_e4m3fn, at::kFloat8_e5m2}) {
      if (rows && format == at::kFloat8_e5m2) continue;
      for (const auto dtype : {at::kBFloat16, at::kFloat}) {
        const auto results = [&](c10::Device device) -> Results {
          const auto narrowed = [&](int64_t count, double speed, at::ScalarType to) {
            const at::Tensor x = wave_on(device, {count, 256}, speed, at::kFloat);
            return kernels::to_fp8(x, to,
                                   kernels::fp8_scale(rows ? kernels::largest_absolute_of_rows(x)
                                                           : kernels::largest_absolute(x),
                                                      to));
          };
          const Fp8Matrix a = narrowed(48, 0.3, format), b = narrowed(64, 0.7, at::kFloat8_e4m3fn);
          const at::Tensor bias = wave_on(device, {64}, 0.2, dtype);
          return {kernels::scaled_mm(a, b, {}, dtype, false),
                  kernels::scaled_mm(a, b, bias, dtype, true)};
        };
        const Results cpu = results(at::kCPU);
        LOCKSTEP_NEEDS_CUDA();
        const Results cuda = results(kCuda);
        // The fast accumulation of the second product has fewer bits.
        expect_same({cuda[0]}, {cpu[0]}, rows ? at::kBFloat16 : dtype);
        expect_same({cuda[1]}, {cpu[1]}, at::kBFloat16);
      }
    }
}

TEST(LayerKernels, MatricesThatBeginAnywhereBecomeMatricesOf8Bits) {
  const auto codes = [](c10::Device device) {
    const at::Tensor flat = wave_on(device, {264}, 0.3, at::kBFloat16);
    return kernels::to_fp8_matrices(flat.narrow(0, 4, 256).view({16, 16}), at::kFloat8_e4m3fn,
                                    at::full({1, 1}, 17.0f).to(device), kernels::Fp8Sides::both)
        .transposed.values.view(at::kByte)
        .cpu();
  };
  const at::Tensor cpu = codes(at::kCPU);
  LOCKSTEP_NEEDS_CUDA();
  EXPECT_TRUE(at::equal(codes(kCuda), cpu));
}

TEST(LayerKernels, RotaryEmbeddingEqualsTheCpu) {
  for (const auto dtype : kLayerDtypes) {
    const auto results = [&](c10::Device device) -> Results {
      const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
      const kernels::RotaryTable table = {wave_on(device, {64, 20}, 0.3, wide),
                                          wave_on(device, {64, 20}, 0.4, wide),
                                          at::arange(63, -1, -1, at::kLong).to(device)};
      const kernels::AttentionHeads heads =
          kernels::rotate_heads(wave_on(device, {64, 2, 3, 6, 64}, 0.3, dtype), table, {1, 2});
      return {heads.query, heads.key, heads.value,
              kernels::rotate_heads_backward(heads, table, {1, 2}, 4)};
    };
    const Results cpu = results(at::kCPU);
    LOCKSTEP_NEEDS_CUDA();
    expect_same(results(kCuda), cpu, dtype);
  }
}

TEST(LayerKernels, CrossEntropyEqualsTheCpu) {
  for (const auto dtype : kLayerDtypes)
    for (const int64_t width : {33, 5000})
      for (const double share : {0.0, 0.2}) {
        const auto results = [&](c10::Device device) -> Results {
          const at::Tensor logits = wave_on(device, {300, width}, 0.3, dtype) * 5;
          // The last column that is held; with label smoothing, whose losses would be infinite, the
          // first one of padding.
          logits.select(1, share > 0 ? width - 5 : width - 6)
              .fill_(-std::numeric_limits<double>::infinity());
          at::Tensor labels = at::arange(300).mul(7).remainder(width - 8).add(2);
          labels[3] = kernels::kIgnoredToken;
          labels = labels.to(device);
          const auto sums = kernels::make_cross_entropy_sums(300, logits, share > 0);
          const kernels::TokenColumns columns = {2, width - 5};
          kernels::cross_entropy_sums(logits, labels, columns, sums);
          const at::Tensor losses = kernels::cross_entropy_losses(sums, labels, width, share);
          kernels::cross_entropy_gradient(at::ones_like(losses), logits, labels, columns, sums,
                                          width, share, logits);
          Results all = {sums.highest, sums.sums[1], losses, logits};
          if (share > 0) all.push_back(sums.sums[2]);
          return all;
        };
        const Results cpu = results(at::kCPU);
        LOCKSTEP_NEEDS_CUDA();
        expect_same(results(kCuda), cpu, dtype);
      }
}

}  // namespace
}  // namespace lockstep::testing
