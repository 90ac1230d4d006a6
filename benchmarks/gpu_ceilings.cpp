#include <algorithm>
#include <array>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "lockstep/benchmarks/gpu_bench.h"
#include "lockstep/benchmarks/interleaved.h"
#include "lockstep/kernels/adamw.h"
#include "lockstep/kernels/fingerprint.h"
#include "lockstep/kernels/sgd.h"
#include "lockstep/kernels/sum_of_squares.h"

namespace lockstep::benchmarks {
namespace {

struct Product {
  const char* name;
  int64_t rows, inner, columns;
};

/// 4 sequences of 2048 tokens through a layer of the 1.3B model, its output layer, and a square.
constexpr std::array<Product, 6> kProducts = {{{"qkv", 8192, 2048, 6144},
                                               {"projection", 8192, 2048, 2048},
                                               {"gate and up", 8192, 2048, 11008},
                                               {"down", 8192, 5504, 2048},
                                               {"logits", 8192, 2048, 50304},
                                               {"square", 8192, 8192, 8192}}};
constexpr int kRepeats = 10;

double teraflops(c10::Device device, const Product& product, int64_t divisor) {
  const auto options = at::TensorOptions(device).dtype(at::kBFloat16);
  const int64_t inner = product.inner / divisor;
  const at::Tensor left = at::randn({product.rows / divisor, inner}, options);
  const at::Tensor right = at::randn({product.columns / divisor, inner}, options).t();
  const double seconds = mean_seconds(device, kRepeats, [&] { at::matmul(left, right); });
  const auto flops = 2.0 * static_cast<double>(left.numel() * right.size(1));
  return flops / seconds / 1e12;
}

/// Measures a kernel that moves `bytes` per element.
Json speed(c10::Device device, int64_t numel, double bytes, const std::function<void()>& call) {
  const double seconds = mean_seconds(device, kRepeats, call);
  return {{"ms", seconds * 1e3}, {"gb_per_s", bytes * static_cast<double>(numel) / seconds / 1e9}};
}

}  // namespace

void synchronize(c10::Device device) {
  if (device.is_cpu()) return;
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

double mean_seconds(c10::Device device, int repeats, const std::function<void()>& call) {
  for (int i = 0; i < 2; ++i) call();
  synchronize(device);
  const double seconds = seconds_of([&] {
    for (int i = 0; i < repeats; ++i) call();
    synchronize(device);
  });
  return seconds / repeats;
}

Json measure_ceilings(c10::Device device, bool small) {
  const int64_t bytes = int64_t{1} << (small ? 20 : 30);
  const at::Tensor from = at::ones({bytes}, at::TensorOptions(device).dtype(at::kByte));
  const at::Tensor to = at::empty_like(from);
  const double seconds = mean_seconds(device, kRepeats, [&] { to.copy_(from); });
  Json products = Json::object();
  for (const Product& product : kProducts)
    products[product.name] = teraflops(device, product, small ? 64 : 1);
  return {{"copy_gb_per_s", 2e-9 * static_cast<double>(bytes) / seconds},
          {"bf16_tflops", products},
          {"cudnn", device.is_cuda() ? at::detail::getCUDAHooks().versionCuDNN() : 0}};
}

Json measure_kernels(c10::Device device, bool small) {
  const int64_t n = int64_t{1} << (small ? 16 : 27);
  const auto fp32 = at::TensorOptions(device).dtype(at::kFloat);
  const at::Tensor master = at::ones({n}, fp32), grad = at::full({n}, 1e-3, fp32);
  const at::Tensor mean = at::zeros({n}, fp32), square = at::zeros({n}, fp32);
  const at::Tensor low = at::zeros({n}, fp32.dtype(at::kBFloat16));
  const kernels::UpdateSegments segments = {{0, n}};
  const kernels::AdamWScalars adamw{
      .learning_rate = 1e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
  const kernels::SgdScalars sgd{.learning_rate = 1e-4, .momentum = 0.9, .weight_decay = 0.1};
  return {{"AdamW, fp32 and a bf16 copy",
           speed(device, n, 30,
                 [&] { kernels::adamw(master, grad, mean, square, low, segments, adamw); })},
          {"SGD with momentum, fp32",
           speed(device, n, 20, [&] { kernels::sgd(master, grad, mean, {}, segments, sgd); })},
          {"sum of squares, fp32", speed(device, n, 4, [&] { kernels::sum_of_squares(grad); })},
          {"sum of squares, bf16", speed(device, n, 2, [&] { kernels::sum_of_squares(low); })},
          {"fingerprint", speed(device, n, 4, [&] { kernels::fingerprint(grad); })}};
}

}  // namespace lockstep::benchmarks
