#include "lockstep/kernels/block_product.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/record_function.h>

#include "lockstep/core/integers.h"
#include "lockstep/core/parallel_for.h"
#include "lockstep/kernels/transpose_loop.h"

namespace lockstep::kernels {
namespace {

/// Rows of the result that one call of oneDNN's kernel computes. Libtorch keeps a kernel for each
/// shape, so the number of shapes must stay small.
constexpr int64_t kRows = 64;
/// Terms of a transposed `a` that are copied at a time.
constexpr int64_t kTerms = 256;
/// Rows of a result that stay in a cache while the terms of a transposed `a` are added to it.
constexpr int64_t kRowsOfResult = 1024;
/// The largest `b`: more of it does not stay in the second-level cache beside the other operands.
/// Copying a transposed `a` in parts pays off for longer, because oneDNN's operator copies it, too.
constexpr int64_t kLargest = int64_t{1} << 16, kLargestPart = int64_t{1} << 17;
constexpr int64_t kMultiplicationsOfThread = int64_t{1} << 18;
/// Added to the length of copied rows: rows that are a power of two apart share cache sets.
constexpr int64_t kGap = 16;

/// A matrix whose rows are contiguous, and how far they are apart.
struct Rows {
  const float* data;
  int64_t stride;
};

bool lies_in_rows(const at::Tensor& x) { return x.stride(1) == 1 && x.stride(0) >= x.size(1); }
bool lies_in_columns(const at::Tensor& x) { return x.stride(0) == 1 && x.stride(1) >= x.size(0); }

/// Terms first ... first + count of `b`. `memory` holds them if they are a copy.
Rows rows_of(const at::Tensor& b, int64_t first, int64_t count, at::Tensor& memory) {
  const float* const data = b.const_data_ptr<float>() + first * b.stride(0);
  if (lies_in_rows(b)) return {data, b.stride(0)};
  if (!memory.defined()) memory = at::empty({count, b.size(1)}, b.options());
  auto* const copy = memory.mutable_data_ptr<float>();
  transpose_loop(data, b.stride(1), copy, b.size(1), b.size(1), count);
  return {copy, b.size(1)};
}

/// result = a b for a result that is given as rows, too.
void multiply_rows(int64_t rows, int64_t columns, int64_t terms, const Rows& a, const Rows& b,
                   float* result, int64_t stride, bool adds) {
  at::native::cpublas::brgemm(rows, columns, terms, a.stride, b.stride, stride, adds, a.data,
                              b.data, result);
}

/// Calls visit(first row, number of rows) for parts of the rows [first, end), on several threads.
template <class Visit>
void for_rows(int64_t first, int64_t end, int64_t multiplications_of_row, Visit visit) {
  const int64_t grain = kMultiplicationsOfThread / (kRows * multiplications_of_row);
  parallel_for(0, ceil_div(end - first, kRows), std::max<int64_t>(1, grain),
               [&](int64_t begin, int64_t stop) {
                 for (int64_t i = begin; i < stop; ++i) {
                   const int64_t row = first + i * kRows;
                   visit(row, std::min(kRows, end - row));
                 }
               });
}

void multiply(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b, bool adds) {
  const int64_t terms = a.size(1), columns = b.size(1), stride = result.stride(0);
  at::Tensor memory;
  const Rows other = rows_of(b, 0, terms, memory);
  const Rows own = {a.const_data_ptr<float>(), a.stride(0)};
  auto* const out = result.mutable_data_ptr<float>();
  for_rows(0, a.size(0), columns * terms, [&](int64_t row, int64_t rows) {
    multiply_rows(rows, columns, terms, {own.data + row * own.stride, own.stride}, other,
                  out + row * stride, stride, adds);
  });
}

/// The same for an `a` whose columns are contiguous.
void multiply_transposed(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b,
                         bool adds) {
  const int64_t terms = a.size(1), columns = b.size(1), stride = result.stride(0);
  const int64_t length = std::min(kTerms, terms) + kGap;
  const auto* const data = a.const_data_ptr<float>();
  auto* const out = result.mutable_data_ptr<float>();
  at::Tensor memory;
  const auto add_terms = [&](int64_t begin, int64_t first, int64_t count) {
    const Rows other = rows_of(b, first, count, memory);
    const int64_t end = std::min(begin + kRowsOfResult, a.size(0));
    for_rows(begin, end, columns * count, [&](int64_t row, int64_t rows) {
      alignas(64) float copy[kRows * (kTerms + kGap)];
      transpose_loop(data + first * a.stride(1) + row, a.stride(1), copy, length, count, rows);
      multiply_rows(rows, columns, count, {copy, length}, other, out + row * stride, stride,
                    adds || first > 0);
    });
  };
  for (int64_t begin = 0; begin < a.size(0); begin += kRowsOfResult)
    for (int64_t first = 0; first < terms; first += kTerms)
      add_terms(begin, first, std::min(kTerms, terms - first));
}

}  // namespace

bool fits_block_product(const at::Tensor& a, const at::Tensor& b) {
  const int64_t rows = a.size(0), terms = a.size(1), columns = b.size(1);
  if (std::min({rows, terms, columns}) < 2) return false;
  if (!lies_in_rows(b) && !lies_in_columns(b)) return false;
  if (lies_in_rows(a)) return rows % kRows == 0 && terms <= kLargest / columns;
  return lies_in_columns(a) && terms % kRows == 0 &&
         std::min(kTerms, terms) <= kLargestPart / columns;
}

void block_product(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b, bool adds) {
  RECORD_FUNCTION("lockstep::block_product", std::vector<c10::IValue>());
  lies_in_rows(a) ? multiply(result, a, b, adds) : multiply_transposed(result, a, b, adds);
}

}  // namespace lockstep::kernels
