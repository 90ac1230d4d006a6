#pragma once

#include <array>
#include <cstdint>

#include <ATen/core/Tensor.h>

namespace lockstep::kernels {

/// Which rows of a tensor share an index: row r has the index (r / stride) % count.
struct RowAxis {
  int64_t stride = 1, count = 1;
};

/// Which random word each element of the rows gets: for channel i, word i % 4 of block i / 4 of
/// Philox4x32-10 (see philox.h), in the field of a key, for the row's sample, position and lane.
/// The lane distinguishes rows with the same sample and position, such as those of several heads.
struct RandomPlaces {
  std::array<uint32_t, 2> key = {};
  RowAxis sample = {}, position = {}, lane = {};                 ///< give the row's index of each
  int64_t first_sample = 0, first_position = 0, first_lane = 0;  ///< added to the index
  int64_t first_channel = 0;                                     ///< of each row, >= 0
  /// int64 [], in place of first_sample; may be undefined.
  at::Tensor sample_on_device = {};
  /// int64 [position.count], the position of each index, in place of first_position + index; may be
  /// undefined.
  at::Tensor positions = {};
};

/// Zeroes the share `probability`, in [0, 1), of the elements of `x` [..., channels], namely those
/// whose word is below probability * 2^32, multiplies the others by 1 / (1 - probability), and adds
/// `residual`, which has the same shape and dtype, unless it is undefined. fp32, fp64, bf16 or
/// fp16; computed in fp32, or in fp64 for fp64, and rounded before the residual is added and again
/// after it. One pass; the result is a new tensor, and nothing else is kept: the gradient of `x` is
/// dropout() of the result's gradient, at the same places. The host does not wait for a device.
/// UsageError for another dtype.
at::Tensor dropout(const at::Tensor& x, const at::Tensor& residual, double probability,
                   const RandomPlaces& places);

}  // namespace lockstep::kernels
