#include "lockstep/models/input_check.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/narrow_dtype.h"

namespace lockstep {
namespace {

bool has_width(const at::Tensor& input, int64_t width, int64_t dims) {
  return input.defined() && input.dim() >= dims && input.size(-1) == width;
}

}  // namespace

void refuse_input(const at::Tensor& input, const char* dims, int64_t width, at::ScalarType dtype,
                  const std::string& label) {
  fail<UsageError>("{}: found an {}, allowed: [{}, {}] of {}", label,
                   input.defined() ? "input " + form_of(input) : "undefined input", dims, width,
                   at::toString(dtype));
}

std::string form_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  return fmt::format("[{}] of {}", fmt::join(tensor.sizes(), ", "),
                     at::toString(tensor.scalar_type()));
}

void check_input(const at::Tensor& input, int64_t width, const at::Tensor& weight,
                 const std::string& label, int64_t dims) {
  if (!has_width(input, width, dims) || input.scalar_type() != weight.scalar_type()) [[unlikely]]
    refuse_input(input, dims > 1 ? "sequence / ranks, ..." : "...", width, weight.scalar_type(),
                 label);
}

void check_normalized(const at::Tensor& input, const at::Tensor& weight, const std::string& label) {
  const int64_t width = weight.size(0);
  if (!has_width(input, width, 1) ||
      (input.scalar_type() != weight.scalar_type() &&
       !(is_narrow(input.scalar_type()) && weight.scalar_type() == at::kFloat))) [[unlikely]]
    refuse_input(input, "...", width, weight.scalar_type(), label);
}

void check_sequence_documents(const SequenceDocuments& documents, int64_t sequences, int64_t length,
                              const char* label) {
  const auto found = static_cast<int64_t>(documents.size());
  require<UsageError>(found == sequences, "{}: found those of {} sequences, allowed: {}", label,
                      found, sequences);
  for (const std::vector<int64_t>& lengths : documents) {
    int64_t sum = 0, least = 1;
    for (const int64_t tokens : lengths) {
      least = std::min(least, tokens);
      sum += tokens;
    }
    require<UsageError>(sum == length && least > 0,
                        "{}: found {} tokens in all, allowed: {}, in documents of >= 1", label, sum,
                        length);
  }
}

}  // namespace lockstep
