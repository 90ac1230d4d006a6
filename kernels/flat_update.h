#pragma once

// Internal: what updates of flat tensors have in common.

#include <array>
#include <cstdint>
#include <functional>
#include <optional>

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/adamw_scalars.h"
#include "lockstep/kernels/sgd_scalars.h"
#include "lockstep/kernels/step_control.h"
#include "lockstep/kernels/update_segment.h"

namespace lockstep::kernels {

/// The operands of an update of `master`, named for messages.
class FlatUpdate {
 public:
  /// `kernel` is its name. UsageError: `master` is not a contiguous fp32 or fp64 tensor.
  FlatUpdate(const char* kernel, const at::Tensor& master);

  /// UsageError unless `tensor` is contiguous, as long as the master weights, on their device, and
  /// of their dtype or, with fp32 master weights, bf16 or, with `allow_fp16`, fp16.
  void check_operand(const char* name, const at::Tensor& tensor, bool allow_fp16) const;
  /// UsageError unless `tensor` is undefined or a bf16 or fp16 copy of fp32 master weights.
  void check_copy(const at::Tensor& tensor) const;
  /// UsageError unless the segments are in order and not empty.
  void check_segments(const UpdateSegments& segments) const;
  /// UsageError unless `control` is undefined or as described at StepControl; `longest` is its
  /// length with all numbers.
  void check_control(const StepControl& control, int64_t longest) const;

 private:
  void check_shape(const char* name, const at::Tensor& tensor, bool right_dtype,
                   const char* allowed) const;

  const char* kernel_;
  const at::Tensor& master_;
};

/// On the CPU: `scalars` with the values that `control` overrides, or nothing if the step is to be
/// skipped.
std::optional<AdamWScalars> read_control(const StepControl& control, AdamWScalars scalars);
std::optional<SgdScalars> read_control(const StepControl& control, SgdScalars scalars);

/// Calls `run(begin, end)` for parts of the segments, in parallel.
void for_segments(const UpdateSegments& segments, const std::function<void(int64_t, int64_t)>& run);

/// A flat CPU tensor whose values are fp32, or are converted block by block.
class FloatBlocks {
 public:
  static constexpr int64_t kBlock = 2048;
  using Scratch = std::array<float, kBlock>;

  explicit FloatBlocks(const at::Tensor& tensor);

  /// Whether there is nothing to convert; true also for an undefined tensor.
  bool is_float() const { return dtype_ == at::kFloat; }
  /// All values in place, if there is nothing to convert.
  float* floats() const { return static_cast<float*>(data_); }
  /// The bits of all values, if they are bf16; else null.
  uint16_t* bf16() const {
    return data_ && dtype_ == at::kBFloat16 ? static_cast<uint16_t*>(data_) : nullptr;
  }
  /// `n` values from `start` on, in place or in `scratch`; null for an undefined tensor.
  float* read(int64_t start, int64_t n, Scratch& scratch) const;
  /// Stores `values` from `start` on; does nothing if read() returned them in place.
  void write(int64_t start, int64_t n, const float* values) const;

 private:
  void* data_;
  at::ScalarType dtype_;
};

}  // namespace lockstep::kernels
