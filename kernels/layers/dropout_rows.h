#pragma once

// Internal: the operands of dropout_body.h.

#include <cstdint>

#include "lockstep/kernels/float_storage.h"

namespace lockstep::kernels {

/// See RowAxis, and RandomPlaces for the first index.
struct PlaceAxis {
  int64_t stride, count, first;

  LOCKSTEP_LANE int64_t index(int64_t row) const { return row / stride % count; }
};

/// Tensors [rows, width], see DropoutTensors; `residual`, `sample_on_device` and `positions` may be
/// null.
template <class T>
struct DropoutRows {
  const T *x, *residual;
  T* result;
  const int64_t *sample_on_device, *positions;
  PlaceAxis sample, position, lane;
  int64_t first_channel, width;
  uint32_t key[2];
  uint32_t threshold;  ///< an element whose word is below it is dropped
  Wide<T> scale;       ///< multiplies the other elements

  /// The Philox blocks that the elements of a row use.
  LOCKSTEP_LANE int64_t first_block() const { return first_channel / 4; }
  LOCKSTEP_LANE int64_t num_blocks() const {
    return (first_channel + width + 3) / 4 - first_block();
  }
};

}  // namespace lockstep::kernels
