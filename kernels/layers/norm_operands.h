#pragma once

// Internal: the tensors of a norm, all allocated and contiguous, for the CPU's and the devices'
// kernels.

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/norm_rows.h"
#include "lockstep/kernels/storage_of.h"

namespace lockstep::kernels {

/// [..., width], rows * width elements: x, residual, sum, normalized; [width]: weight, bias;
/// [rows]: mean, root. `residual` and `sum` are either both defined or both undefined; `bias` and
/// `mean` are undefined for RMSNorm.
struct NormTensors {
  at::Tensor x, residual, weight, bias, sum, normalized, mean, root;
  double epsilon = 0;

  bool centred() const { return mean.defined(); }
  int64_t width() const { return weight.size(0); }
  int64_t num_rows() const { return x.numel() / width(); }

  template <class T>
  NormRows<T> rows() const {
    using W = Wide<T>;
    return {elements<T>(x),
            elements<T>(residual),
            elements<W>(weight),
            elements<W>(bias),
            elements<T>(sum),
            elements<T>(normalized),
            elements<W>(mean),
            elements<W>(root),
            width(),
            epsilon};
  }
};

/// [..., width], rows * width elements: grad, sum_grad, source (the sum of forward), input_grad;
/// [rows]: mean, root; [width]: weight; [parts, width]: weight_parts, bias_parts, whose row p gets
/// the sums over the rows from p * rows_a_part on. `sum_grad` may be undefined; `mean` is undefined
/// for RMSNorm, and the parts are undefined if they are not wanted.
struct NormGradientTensors {
  at::Tensor grad, sum_grad, source, mean, root, weight, input_grad, weight_parts, bias_parts;
  int64_t num_parts = 0, rows_a_part = 0;

  bool centred() const { return mean.defined(); }
  int64_t width() const { return weight.size(0); }
  int64_t num_rows() const { return source.numel() / width(); }

  template <class T>
  NormGradientRows<T> rows() const {
    using W = Wide<T>;
    return {elements<T>(grad), elements<T>(sum_grad), elements<T>(source),     elements<W>(mean),
            elements<W>(root), elements<W>(weight),   elements<T>(input_grad), width()};
  }
};

}  // namespace lockstep::kernels
