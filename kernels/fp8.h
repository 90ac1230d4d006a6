#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

/// Matrices of 8-bit floats with scales, and their product. The formats are e4m3
/// (at::kFloat8_e4m3fn, largest number 448) and e5m2 (at::kFloat8_e5m2, largest number 57344), from
/// Micikevicius et al., "FP8 formats for deep learning", 2022.
///
/// CUDA multiplies with at::_scaled_mm, on GPUs of compute capability 8.9 and from 9 on. The CPU
/// multiplies the same numbers in fp32: only the order of the sums differs.
namespace lockstep::kernels {

/// Rows and columns of operands on CUDA are multiples of it: its kernels read and write 16 numbers
/// of 8 bits at once.
inline constexpr int64_t kFp8Multiple = 16;

/// [rows, width]; element (i, j) represents values[i, j] * inverse_scales[i or 0].
struct Fp8Matrix {
  at::Tensor values;          ///< contiguous, in one of the two formats
  at::Tensor inverse_scales;  ///< fp32 [1, 1], or [rows, 1]
};

/// The largest absolute value of all elements, fp32 [1, 1]; 0 if there are none, NaN if any is NaN.
/// Here and below, x is fp64, fp32, bf16 or fp16, and may be empty.
at::Tensor largest_absolute(const at::Tensor& x);

/// The same for each row of a matrix, fp32 [rows, 1], and for each column, fp32 [width, 1].
at::Tensor largest_absolute_of_rows(const at::Tensor& x);
at::Tensor largest_absolute_of_columns(const at::Tensor& x);

/// The scale that maps `largest` to the largest number of `format`, divided by 2^margin; 1 if
/// `largest` is 0 or not finite.
at::Tensor fp8_scale(const at::Tensor& largest, at::ScalarType format, int64_t margin = 0);

/// x [rows, width] times `scale` (fp32 [1, 1] or [rows, 1]), rounded to the nearest numbers of
/// `format`, ties to even. A value larger than the largest number becomes that number, unless it is
/// infinite: infinity and NaN become NaN, so that they are noticed.
Fp8Matrix to_fp8(const at::Tensor& x, at::ScalarType format, const at::Tensor& scale);

/// A matrix and its transpose, for products along its rows and along its columns. If one of them is
/// not wanted, it is undefined.
struct Fp8Matrices {
  Fp8Matrix matrix, transposed;
};
enum class Fp8Sides { matrix, transposed, both };

/// to_fp8() of x [rows, width] and of its transpose. `scale` is fp32 [1, 1] or, for a single side,
/// one per row of that side: [rows, 1] for the matrix, [width, 1] for the transpose. `largest` is
/// fp32 [1, 1], or undefined; it becomes the maximum of itself and the absolute values of x. CUDA
/// does this in one pass over x if `rows`, `width` and x's address are multiples of 16: per bf16
/// element, 2 bytes are read and one is written for each side. Otherwise it takes several passes.
Fp8Matrices to_fp8_matrices(const at::Tensor& x, at::ScalarType format, const at::Tensor& scale,
                            Fp8Sides sides, const at::Tensor& largest = {});

/// a [m, k], b [n, k] -> a b^T (+ `bias` [n]), [m, n] in `dtype`, which is bf16, fp16 or fp32. CUDA
/// rounds a product with row scales to bf16 first: only some GPUs support another dtype.
/// `fast_sums`: CUDA may keep fewer bits of the sums. CUDA needs k and n to be multiples of 16, and
/// allows e5m2 in at most one operand, with row scales in `a`.
at::Tensor scaled_mm(const Fp8Matrix& a, const Fp8Matrix& b, const std::optional<at::Tensor>& bias,
                     at::ScalarType dtype, bool fast_sums);

}  // namespace lockstep::kernels
