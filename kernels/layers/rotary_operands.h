#pragma once

// Internal: the tensors of rotary embedding, all allocated, for the CPU's and the devices' kernels.

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/rotary.h"
#include "lockstep/kernels/rotary_body.h"
#include "lockstep/kernels/storage_of.h"

namespace lockstep::kernels {

/// `packed` and the tables are contiguous; the heads have contiguous channels. With `backward` the
/// heads are read and `packed` is written, otherwise the other way round.
struct RotaryTensors {
  at::Tensor packed;
  AttentionHeads heads;
  RotaryTable table;
  QueryRange queries;
  bool backward;

  int64_t num_rows() const { return packed.size(0) * packed.size(1); }

  template <class T>
  RotaryHeads<T> pointers() const {
    return {elements<T>(packed),
            strides_of<T>(heads.query),
            strides_of<T>(heads.key),
            strides_of<T>(heads.value),
            elements<Wide<T>>(table.cos),
            elements<Wide<T>>(table.sin),
            elements<int64_t>(table.positions),
            each_sample() ? packed.size(1) : 1,
            each_sample() ? 1 : 0,
            packed.size(1),
            packed.size(2),
            packed.size(3) - 2,
            queries.first,
            queries.count,
            packed.size(4),
            2 * table.cos.size(1)};
  }

 private:
  /// Whether each sample has its own positions.
  bool each_sample() const { return table.positions.defined() && table.positions.dim() == 2; }

  template <class T>
  static HeadStrides<T> strides_of(const at::Tensor& heads) {
    return {elements<T>(heads), heads.stride(0), heads.stride(1), heads.stride(2)};
  }
};

}  // namespace lockstep::kernels
