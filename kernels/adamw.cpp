#include "lockstep/kernels/adamw.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/kernels/adamw_loop.h"
#include "lockstep/kernels/device_kernels.h"
#include "lockstep/kernels/flat_update.h"

namespace lockstep::kernels {
namespace {

/// The operands of an update of fp32 master weights on the CPU.
struct AdamWOperands {
  float* p;
  FloatBlocks g, m, v, low;

  /// Whether only weights are converted, to bf16; the loop does this itself.
  bool copies_alone() const {
    return g.is_float() && m.is_float() && v.is_float() && low.bf16() != nullptr;
  }
  bool converts() const {
    return !(g.is_float() && m.is_float() && v.is_float() && low.is_float());
  }

  void run(int64_t start, int64_t end, const AdamWScalars& scalars) const {
    if (copies_alone())
      return adamw_loop(p + start, g.floats() + start, m.floats() + start, v.floats() + start,
                        low.bf16() + start, end - start, scalars);
    run_blocks(start, end, scalars);
  }

  /// Runs block by block, so that converted values stay in the cache.
  void run_blocks(int64_t start, int64_t end, const AdamWScalars& scalars) const {
    FloatBlocks::Scratch wide_g, wide_m, wide_v;
    const int64_t block = converts() ? FloatBlocks::kBlock : end - start;
    for (; start < end; start += block) {
      const int64_t n = std::min(block, end - start);
      float* const mean = m.read(start, n, wide_m);
      float* const square = v.read(start, n, wide_v);
      adamw_loop(p + start, g.read(start, n, wide_g), mean, square, n, scalars);
      m.write(start, n, mean);
      v.write(start, n, square);
      low.write(start, n, p + start);
    }
  }
};

}  // namespace

void adamw(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& exp_avg,
           const at::Tensor& exp_avg_sq, const at::Tensor& low_precision,
           const UpdateSegments& segments, const AdamWScalars& scalars,
           const StepControl& control) {
  const FlatUpdate update("adamw", master);
  update.check_operand("grad", grad, /*allow_fp16=*/true);
  update.check_operand("exp_avg", exp_avg, /*allow_fp16=*/false);
  update.check_operand("exp_avg_sq", exp_avg_sq, /*allow_fp16=*/false);
  update.check_copy(low_precision);
  update.check_segments(segments);
  update.check_control(control, kAdamWControl);
  if (!master.is_cpu()) {
    const c10::DeviceGuard guard(master.device());
    return device_kernels("adamw", master.device().type())
        .adamw(master, grad, exp_avg, exp_avg_sq, low_precision, segments, scalars, control);
  }
  const std::optional<AdamWScalars> read = read_control(control, scalars);
  if (!read) return;
  const AdamWScalars& numbers = *read;
  if (master.scalar_type() == at::kDouble) {
    auto *const p = master.data_ptr<double>(), *const m = exp_avg.data_ptr<double>(),
                *const v = exp_avg_sq.data_ptr<double>();
    const auto* const g = grad.const_data_ptr<double>();
    return for_segments(segments, [&](int64_t begin, int64_t end) {
      adamw_loop(p + begin, g + begin, m + begin, v + begin, end - begin, numbers);
    });
  }
  const AdamWOperands operands{master.data_ptr<float>(), FloatBlocks(grad), FloatBlocks(exp_avg),
                               FloatBlocks(exp_avg_sq), FloatBlocks(low_precision)};
  for_segments(segments, [&](int64_t begin, int64_t end) { operands.run(begin, end, numbers); });
}

}  // namespace lockstep::kernels
