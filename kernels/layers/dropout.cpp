#include "lockstep/kernels/dropout.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/parallel_for.h"
#include "lockstep/kernels/dropout_loop.h"
#include "lockstep/kernels/dropout_operands.h"
#include "lockstep/kernels/layer_kernels.h"

namespace lockstep::kernels {
namespace {

void check_places(const at::Tensor& x, const RandomPlaces& places) {
  const at::Tensor &sample = places.sample_on_device, &positions = places.positions;
  require<UsageError>(!sample.defined() || (sample.scalar_type() == at::kLong &&
                                            sample.numel() == 1 && sample.device() == x.device()),
                      "dropout: found {} samples of {} on {}, allowed: 1 of Long on {}",
                      sample.defined() ? sample.numel() : 0,
                      sample.defined() ? at::toString(sample.scalar_type()) : "",
                      sample.defined() ? sample.device().str() : "", x.device().str());
  require<UsageError>(!positions.defined() || (positions.scalar_type() == at::kLong &&
                                               positions.numel() == places.position.count &&
                                               positions.device() == x.device()),
                      "dropout: found {} positions of {} on {}, allowed: {} of Long on {}",
                      positions.defined() ? positions.numel() : 0,
                      positions.defined() ? at::toString(positions.scalar_type()) : "",
                      positions.defined() ? positions.device().str() : "", places.position.count,
                      x.device().str());
}

}  // namespace

void dropout_cpu(const DropoutTensors& t) {
  for_storage("dropout", t.x.scalar_type(), [&](auto element) {
    const auto rows = t.rows<decltype(element)>();
    parallel_for(0, t.num_rows(), std::max<int64_t>(1, (1 << 13) / t.width()),
                 [&](int64_t first, int64_t end) { dropout_loop(rows, first, end); });
  });
}

at::Tensor dropout(const at::Tensor& x, const at::Tensor& residual, double probability,
                   const RandomPlaces& places) {
  require<UsageError>(probability >= 0 && probability < 1,
                      "dropout: found a probability of {}, allowed: >= 0 and < 1", probability);
  require<UsageError>(
      !residual.defined() || (residual.sizes() == x.sizes() && residual.dtype() == x.dtype() &&
                              residual.device() == x.device()),
      "dropout: found a residual [{}] of {} on {}, allowed: [{}] of {} on {}, as of the input",
      residual.defined() ? fmt::to_string(fmt::join(residual.sizes(), ", ")) : "",
      residual.defined() ? at::toString(residual.scalar_type()) : "",
      residual.defined() ? residual.device().str() : "", fmt::join(x.sizes(), ", "),
      at::toString(x.scalar_type()), x.device().str());
  check_places(x, places);
  DropoutTensors t = {.x = x.contiguous(),
                      .residual = residual.defined() ? residual.contiguous() : residual,
                      .result = at::empty(x.sizes(), x.options()),
                      .probability = probability,
                      .places = places};
  if (places.positions.defined()) t.places.positions = places.positions.contiguous();
  if (x.numel() == 0) return t.result;
  const c10::DeviceGuard guard(x.device());
  layer_kernels("dropout", x).dropout(t);
  return t.result;
}

}  // namespace lockstep::kernels
