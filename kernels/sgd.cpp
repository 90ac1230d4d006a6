#include "lockstep/kernels/sgd.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/kernels/device_kernels.h"
#include "lockstep/kernels/flat_update.h"
#include "lockstep/kernels/sgd_loop.h"

namespace lockstep::kernels {
namespace {

/// The operands of an update of fp32 master weights on the CPU.
struct SgdOperands {
  float* p;
  FloatBlocks g, b, low;

  void run(int64_t start, int64_t end, const SgdScalars& scalars) const {
    FloatBlocks::Scratch wide_g, wide_b;
    const bool converts = !(g.is_float() && b.is_float() && low.is_float());
    const int64_t block = converts ? FloatBlocks::kBlock : end - start;
    for (; start < end; start += block) {
      const int64_t n = std::min(block, end - start);
      float* const momentum = b.read(start, n, wide_b);
      sgd_loop(p + start, g.read(start, n, wide_g), momentum, n, scalars);
      b.write(start, n, momentum);
      low.write(start, n, p + start);
    }
  }
};

}  // namespace

void sgd(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& momentum_buffer,
         const at::Tensor& low_precision, const UpdateSegments& segments, const SgdScalars& scalars,
         const StepControl& control) {
  const FlatUpdate update("sgd", master);
  update.check_operand("grad", grad, /*allow_fp16=*/true);
  if (momentum_buffer.defined())
    update.check_operand("momentum_buffer", momentum_buffer, /*allow_fp16=*/false);
  require<UsageError>(momentum_buffer.defined() || scalars.momentum == 0,
                      "sgd: found a momentum of {} without momentum_buffer, allowed: 0",
                      scalars.momentum);
  update.check_copy(low_precision);
  update.check_segments(segments);
  update.check_control(control, kSgdControl);
  if (!master.is_cpu()) {
    const c10::DeviceGuard guard(master.device());
    return device_kernels("sgd", master.device().type())
        .sgd(master, grad, momentum_buffer, low_precision, segments, scalars, control);
  }
  const std::optional<SgdScalars> read = read_control(control, scalars);
  if (!read) return;
  const SgdScalars& numbers = *read;
  if (master.scalar_type() == at::kDouble) {
    auto* const p = master.data_ptr<double>();
    auto* const b = momentum_buffer.defined() ? momentum_buffer.data_ptr<double>() : nullptr;
    const auto* const g = grad.const_data_ptr<double>();
    return for_segments(segments, [&](int64_t begin, int64_t end) {
      sgd_loop(p + begin, g + begin, b ? b + begin : nullptr, end - begin, numbers);
    });
  }
  const SgdOperands operands{master.data_ptr<float>(), FloatBlocks(grad),
                             FloatBlocks(momentum_buffer), FloatBlocks(low_precision)};
  for_segments(segments, [&](int64_t begin, int64_t end) { operands.run(begin, end, numbers); });
}

}  // namespace lockstep::kernels
