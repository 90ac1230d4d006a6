#include "lockstep/parallel_state/transport.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/narrow_dtype.h"

namespace lockstep {

Transport::Parts Transport::exchange(const at::Tensor& sent, int destination,
                                     const at::Tensor& received, int source, uint64_t identity) {
  Parts parts = receive(received, source, identity);
  try {
    const Parts sending = send(sent, destination, identity);
    parts.insert(parts.end(), sending.begin(), sending.end());
  } catch (...) {
    abandon(parts);
    throw;
  }
  return parts;
}

void Transport::abandon(const Parts& parts) {
  for (const auto& part : parts) part->abandon();
}

bool reducible_on_cpu(at::ScalarType dtype) {
  constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kChar,
                                       at::kShort, at::kInt,    at::kLong,     at::kByte};
  return std::find(std::begin(kTypes), std::end(kTypes), dtype) != std::end(kTypes);
}

int64_t bytes_of_row(const at::Tensor& tensor) {
  const int64_t rows = tensor.size(0);
  return rows == 0 ? 0 : static_cast<int64_t>(tensor.nbytes()) / rows;
}

void scale_terms(at::Tensor terms, const Reduction& reduction) {
  if (!reduction.scales()) return;
  const at::NoGradGuard no_grad;
  const bool rounds_twice = reduction.numerator != 1 && reduction.denominator != 1;
  at::Tensor scaled = rounds_twice && is_narrow(terms.scalar_type()) ? terms.to(at::kFloat) : terms;
  if (reduction.numerator != 1) scaled.mul_(reduction.numerator);
  if (reduction.denominator != 1) scaled.div_(reduction.denominator);
  if (!scaled.is_same(terms)) terms.copy_(scaled);
}

std::vector<int64_t> bytes_of_rows(const at::Tensor& tensor, const std::vector<int64_t>& rows) {
  const int64_t row = bytes_of_row(tensor);
  std::vector<int64_t> bytes;
  bytes.reserve(rows.size());
  for (const int64_t n : rows) bytes.push_back(n * row);
  return bytes;
}

}  // namespace lockstep
