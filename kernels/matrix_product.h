#pragma once

// Internal.

#include <optional>

#include <ATen/core/Tensor.h>

/// The matrix products of linear layers: those of libtorch, except on x86 processors with AVX-512
/// that are not Intel's. There libtorch's library for fp32 (MKL) uses its AVX2 path, so oneDNN,
/// which libtorch also contains, computes fp32 products of 2^20 multiplications or more: by blocks
/// if there is no bias and the matrices fit into caches (see block_product.h), else by an operator.
/// Its sums have a different order, so the last bits differ. A product has the same bits in every
/// run with the same number of threads, whichever library computes it.
namespace lockstep::kernels {

/// Whether oneDNN computes large products of `x`: in fp32 on the CPU, on those processors, or as
/// the environment variable LOCKSTEP_ONEDNN (0 or 1) says; never if libtorch was built without
/// oneDNN, or may not use it (at::Context::setUserEnabledMkldnn()). ConfigError as for
/// check_matrix_products(), from the first call for such an `x`.
bool onednn_multiplies(const at::Tensor& x);

/// ConfigError if LOCKSTEP_ONEDNN is neither 0 nor 1.
void check_matrix_products();

/// x matrix^T (+ bias): x [..., in], matrix [out, in], bias [out] -> [..., out].
at::Tensor linear_product(const at::Tensor& x, const at::Tensor& matrix,
                          const std::optional<at::Tensor>& bias = {});

/// result = x matrix^T (+ bias): x [rows, in], result [rows, out].
void linear_product_into(at::Tensor result, const at::Tensor& x, const at::Tensor& matrix,
                         const std::optional<at::Tensor>& bias = {});

/// a b: a [rows, n], b [n, columns] -> [rows, columns].
at::Tensor product(const at::Tensor& a, const at::Tensor& b);

/// result = a b, both with two dimensions. oneDNN's operator uses up to 16 MiB of temporary memory
/// for this and for add_product(), or that of 256 rows of `a` and `result`; plus a copy of `b` if
/// neither `b` nor its transpose is contiguous.
void product_into(at::Tensor result, const at::Tensor& a, const at::Tensor& b);

/// result += a b. oneDNN's operator computes it from 2^22 multiplications and sums of 64 terms on.
void add_product(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b);

}  // namespace lockstep::kernels
