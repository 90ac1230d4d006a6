#include "lockstep/kernels/flat_update.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/narrow_dtype.h"
#include "lockstep/core/parallel_for.h"
#include "lockstep/kernels/narrow_floats.h"

namespace lockstep::kernels {
namespace {

constexpr int64_t kShortControl = 2;

/// Reads the values that both updates use; returns false if the step is to be skipped.
template <class Scalars>
bool read_changing(const StepControl& control, Scalars& scalars) {
  if (!control.defined()) return true;
  const auto* const values = control.const_data_ptr<double>();
  if (values[1] == 0) return false;
  scalars.grad_scale = values[0];
  if (control.numel() == kShortControl) return true;
  scalars.learning_rate = values[2];
  scalars.weight_decay = values[3];
  return true;
}

}  // namespace

FlatUpdate::FlatUpdate(const char* kernel, const at::Tensor& master)
    : kernel_(kernel), master_(master) {
  const at::ScalarType dtype = master.scalar_type();
  require<UsageError>(dtype == at::kFloat || dtype == at::kDouble,
                      "{}: the master weights are {}, allowed: Float, Double", kernel,
                      at::toString(dtype));
  require<UsageError>(master.is_contiguous(), "{}: master is not contiguous", kernel);
}

void FlatUpdate::check_shape(const char* name, const at::Tensor& tensor, bool right_dtype,
                             const char* allowed) const {
  require<UsageError>(tensor.is_contiguous() && tensor.numel() == master_.numel() && right_dtype &&
                          tensor.device() == master_.device(),
                      "{}: {} is {} elements of {} on {}, allowed: {} contiguous elements of {} on "
                      "{}",
                      kernel_, name, tensor.numel(), at::toString(tensor.scalar_type()),
                      tensor.device().str(), master_.numel(), allowed, master_.device().str());
}

void FlatUpdate::check_operand(const char* name, const at::Tensor& tensor, bool allow_fp16) const {
  const at::ScalarType dtype = tensor.scalar_type();
  const bool narrow = is_narrow(dtype) && (allow_fp16 || dtype != at::kHalf);
  const bool wide = master_.scalar_type() == at::kDouble;
  check_shape(name, tensor, dtype == master_.scalar_type() || (narrow && !wide),
              wide         ? "Double"
              : allow_fp16 ? "Float, BFloat16 or Half"
                           : "Float or BFloat16");
}

void FlatUpdate::check_copy(const at::Tensor& tensor) const {
  if (!tensor.defined()) return;
  require<UsageError>(master_.scalar_type() == at::kFloat,
                      "{}: a copy of lower precision needs fp32 master weights", kernel_);
  check_shape("low_precision", tensor, is_narrow(tensor.scalar_type()), "BFloat16 or Half");
}

void FlatUpdate::check_segments(const UpdateSegments& segments) const {
  int64_t end = 0;
  for (const UpdateSegment& segment : segments) {
    require<UsageError>(
        segment.start >= end && segment.start < segment.end && segment.end <= master_.numel(),
        "{}: segment [{}, {}) after {} in {} elements; allowed: non-empty segments in order",
        kernel_, segment.start, segment.end, end, master_.numel());
    end = segment.end;
  }
}

void FlatUpdate::check_control(const StepControl& control, int64_t longest) const {
  if (!control.defined()) return;
  const int64_t length = control.numel();
  require<UsageError>((length == kShortControl || length == longest) &&
                          control.scalar_type() == at::kDouble && control.is_contiguous() &&
                          control.device() == master_.device(),
                      "{}: control must be {} or {} contiguous elements of Double on {}", kernel_,
                      kShortControl, longest, master_.device().str());
}

std::optional<AdamWScalars> read_control(const StepControl& control, AdamWScalars scalars) {
  if (!read_changing(control, scalars)) return std::nullopt;
  if (control.defined() && control.numel() == kAdamWControl) {
    const auto* const values = control.const_data_ptr<double>();
    scalars.bias_correction1 = values[4];
    scalars.bias_correction2 = values[5];
  }
  return scalars;
}

std::optional<SgdScalars> read_control(const StepControl& control, SgdScalars scalars) {
  if (!read_changing(control, scalars)) return std::nullopt;
  return scalars;
}

void for_segments(const UpdateSegments& segments,
                  const std::function<void(int64_t, int64_t)>& run) {
  if (segments.empty()) return;
  constexpr int64_t kGrain = 1 << 16;  // elements that are worth a thread
  parallel_for(segments.front().start, segments.back().end, kGrain,
               [&](int64_t begin, int64_t end) {
                 auto segment = std::partition_point(segments.begin(), segments.end(),
                                                     [&](const auto& s) { return s.end <= begin; });
                 for (; segment != segments.end() && segment->start < end; ++segment)
                   run(std::max(begin, segment->start), std::min(end, segment->end));
               });
}

FloatBlocks::FloatBlocks(const at::Tensor& tensor)
    : data_(tensor.defined() ? tensor.data_ptr() : nullptr),
      dtype_(tensor.defined() ? tensor.scalar_type() : at::kFloat) {}

float* FloatBlocks::read(int64_t start, int64_t n, Scratch& scratch) const {
  if (!data_) return nullptr;
  if (is_float()) return static_cast<float*>(data_) + start;
  const auto* const bits = static_cast<const uint16_t*>(data_) + start;
  (dtype_ == at::kHalf ? widen_fp16_loop : widen_bf16_loop)(bits, scratch.data(), n);
  return scratch.data();
}

void FloatBlocks::write(int64_t start, int64_t n, const float* values) const {
  if (!data_ || is_float()) return;
  auto* const bits = static_cast<uint16_t*>(data_) + start;
  (dtype_ == at::kHalf ? round_to_fp16_loop : round_to_bf16_loop)(values, bits, n);
}

}  // namespace lockstep::kernels
