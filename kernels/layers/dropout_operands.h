#pragma once

// Internal: the tensors of dropout, all allocated and contiguous, for the CPU's and the devices'
// kernels.

#include <algorithm>
#include <cmath>

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/dropout.h"
#include "lockstep/kernels/dropout_rows.h"
#include "lockstep/kernels/storage_of.h"

namespace lockstep::kernels {

/// [rows, width] each; `residual` may be undefined.
struct DropoutTensors {
  at::Tensor x, residual, result;
  double probability;
  RandomPlaces places;

  int64_t width() const { return x.size(-1); }
  int64_t num_rows() const { return x.numel() / width(); }

  template <class T>
  DropoutRows<T> rows() const {
    const RandomPlaces& p = places;
    return {elements<T>(x),
            elements<T>(residual),
            elements<T>(result),
            elements<int64_t>(p.sample_on_device),
            elements<int64_t>(p.positions),
            {p.sample.stride, p.sample.count, p.first_sample},
            {p.position.stride, p.position.count, p.first_position},
            {p.lane.stride, p.lane.count, p.first_lane},
            p.first_channel,
            width(),
            {p.key[0], p.key[1]},
            threshold(),
            static_cast<Wide<T>>(1 / (1 - probability))};
  }

 private:
  uint32_t threshold() const {
    return static_cast<uint32_t>(std::min(std::round(probability * 0x1p32), 0x1p32 - 1));
  }
};

}  // namespace lockstep::kernels
