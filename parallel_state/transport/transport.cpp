#include "lockstep/parallel_state/transport.h"

#include <algorithm>

namespace lockstep {

bool reducible_on_cpu(at::ScalarType dtype) {
  constexpr at::ScalarType kTypes[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kChar,
                                       at::kShort, at::kInt,    at::kLong,     at::kByte};
  return std::find(std::begin(kTypes), std::end(kTypes), dtype) != std::end(kTypes);
}

int64_t bytes_of_row(const at::Tensor& tensor) {
  const int64_t rows = tensor.size(0);
  return rows == 0 ? 0 : static_cast<int64_t>(tensor.nbytes()) / rows;
}

std::vector<int64_t> bytes_of_rows(const at::Tensor& tensor, const std::vector<int64_t>& rows) {
  const int64_t row = bytes_of_row(tensor);
  std::vector<int64_t> bytes;
  bytes.reserve(rows.size());
  for (const int64_t n : rows) bytes.push_back(n * row);
  return bytes;
}

}  // namespace lockstep
