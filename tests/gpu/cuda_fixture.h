#pragma once

// Shared by the CUDA tests. Without a device, a test runs its CPU part, so that mistakes in it
// show, and is then skipped.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/parallel_state/devices.h"

namespace lockstep::testing {

inline const c10::Device kCuda(c10::kCUDA, 0);

inline at::Tensor wave(int64_t n, double speed, at::ScalarType dtype) {
  return at::sin(at::arange(n, at::kDouble) * speed).to(dtype);
}

/// The largest difference, relative to the largest expected value.
inline double relative_distance(const at::Tensor& found, const at::Tensor& expected) {
  const at::Tensor wide = expected.to(at::kDouble);
  const at::Tensor apart = (found.cpu().to(at::kDouble) - wide).abs().max();
  return apart.item<double>() / wide.abs().max().item<double>();
}

}  // namespace lockstep::testing

#define LOCKSTEP_NEEDS_CUDA() \
  if (::lockstep::cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device"
