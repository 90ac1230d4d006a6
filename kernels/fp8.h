#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

/// Matrices of 8-bit floats with scales, and their product. The formats are e4m3
/// (at::kFloat8_e4m3fn, largest number 448) and e5m2 (at::kFloat8_e5m2, largest number 57344), of
/// Micikevicius et al., "FP8 formats for deep learning", 2022.
///
/// CUDA multiplies with at::_scaled_mm, on GPUs of compute capability 8.9 and from 9 on. The CPU
/// multiplies the same numbers in fp32: only the order of the sums differs.
namespace lockstep::kernels {

/// [rows, width], of which element (i, j) stands for values[i, j] * inverse_scales[i or 0].
struct Fp8Matrix {
  at::Tensor values;          ///< contiguous, in one of the two formats
  at::Tensor inverse_scales;  ///< fp32 [1, 1], or [rows, 1]
};

/// The largest absolute value of all elements, fp32 [1, 1]; NaN where one is.
at::Tensor largest_absolute(const at::Tensor& x);

/// The same of each row of a matrix, fp32 [rows, 1], and of each column, fp32 [width, 1].
at::Tensor largest_absolute_of_rows(const at::Tensor& x);
at::Tensor largest_absolute_of_columns(const at::Tensor& x);

/// What maps `largest` to the largest number of `format`, divided by 2^margin; 1 where `largest` is
/// 0 or not finite.
at::Tensor fp8_scale(const at::Tensor& largest, at::ScalarType format, int64_t margin = 0);

/// x [rows, width] times `scale` (fp32 [1, 1] or [rows, 1]), to the nearest numbers of `format`,
/// ties to even. What is larger than the largest number becomes that number, unless it is infinite:
/// infinity and NaN become NaN, so that they are seen.
Fp8Matrix to_fp8(const at::Tensor& x, at::ScalarType format, const at::Tensor& scale);

/// A matrix and its transpose, for products along its rows and along its columns. One that is not
/// wanted is undefined.
struct Fp8Matrices {
  Fp8Matrix matrix, transposed;
};
enum class Fp8Sides { matrix, transposed, both };

/// to_fp8() of x [rows, width] and of its transpose. `scale` is fp32 [1, 1], or for one side alone
/// that of each of its rows: [rows, 1] for the matrix, [width, 1] for the transpose. `largest` is
/// fp32 [1, 1], or undefined; it becomes the largest of itself and the absolute values of x. CUDA
/// does it in one pass over x where `rows` and `width` are multiples of 16: 2 bytes read an element
/// of bf16, one written for each side.
Fp8Matrices to_fp8_matrices(const at::Tensor& x, at::ScalarType format, const at::Tensor& scale,
                            Fp8Sides sides, const at::Tensor& largest = {});

/// a [m, k], b [n, k] -> a b^T (+ `bias` [n]), [m, n] in `dtype`, which is bf16, fp16 or fp32. CUDA
/// rounds a product with scales of rows to bf16 first: only some GPUs have another. `fast_sums`:
/// CUDA may keep fewer bits of the sums. CUDA needs k and n to be multiples of 16, and takes e5m2
/// in one operand at most, with scales of rows in `a`.
at::Tensor scaled_mm(const Fp8Matrix& a, const Fp8Matrix& b, const std::optional<at::Tensor>& bias,
                     at::ScalarType dtype, bool fast_sums);

}  // namespace lockstep::kernels
