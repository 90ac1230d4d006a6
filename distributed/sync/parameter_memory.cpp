// Finds parameters that lie at the same place in memory.

#include <algorithm>
#include <map>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/parameter_check.h"

namespace lockstep {
namespace {

/// Bytes [begin, end) of a storage that a parameter or buffer spans, with gaps if it is strided.
struct Span {
  const NamedParameter* param;
  bool is_buffer;
  int64_t begin, end;

  bool trained() const { return !is_buffer && param->tensor.requires_grad(); }
};

std::string pair_text(const Span& a, const Span& b) {
  if (a.is_buffer == b.is_buffer)
    return fmt::format("parameters '{}' and '{}'", a.param->name, b.param->name);
  const Span &buffer = a.is_buffer ? a : b, &param = a.is_buffer ? b : a;
  return fmt::format("buffer '{}' and parameter '{}'", buffer.param->name, param.param->name);
}

Span span_of(const NamedParameter& param, bool is_buffer) {
  const at::Tensor& tensor = param.tensor;
  int64_t first = tensor.storage_offset(), last = first;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    last += tensor.stride(dim) * (tensor.size(dim) - 1);
  return {&param, is_buffer, first * tensor.element_size(), (last + 1) * tensor.element_size()};
}

/// Whether two of them with overlapping spans share an element. Marks the elements of one.
bool share_elements(const Span& a, const Span& b) {
  const at::Tensor &first = a.param->tensor, &second = b.param->tensor;
  if (first.is_same(second)) return false;
  if (first.element_size() != second.element_size()) return true;
  const int64_t item = first.element_size();
  const int64_t begin = std::min(a.begin, b.begin) / item;
  const at::Tensor marks = at::zeros({std::max(a.end, b.end) / item - begin}, at::kBool);
  const auto places = [&](const at::Tensor& tensor) {
    return marks.as_strided(tensor.sizes(), tensor.strides(), tensor.storage_offset() - begin);
  };
  places(without_repetition(first)).fill_(true);
  return places(second).any().item<bool>();
}

}  // namespace

void refuse_shared_memory(const std::vector<NamedParameter>& parameters,
                          const std::vector<NamedParameter>& buffers, const char* front) {
  std::map<const c10::StorageImpl*, std::vector<Span>> spans;
  for (const bool of_buffers : {false, true})
    for (const NamedParameter& param : of_buffers ? buffers : parameters)
      if (param.tensor.layout() == at::kStrided && param.tensor.numel() > 0)
        spans[param.tensor.storage().unsafeGetStorageImpl()].push_back(span_of(param, of_buffers));
  for (auto& [storage, list] : spans) {
    std::stable_sort(list.begin(), list.end(),
                     [](const Span& a, const Span& b) { return a.begin < b.begin; });
    for (size_t i = 0; i < list.size(); ++i)
      for (size_t k = i + 1; k < list.size() && list[k].begin < list[i].end; ++k) {
        if (!list[i].trained() && !list[k].trained()) continue;
        require<UsageError>(!share_elements(list[i], list[k]),
                            "{}: {} share memory, allowed: one tensor for both, or memory of "
                            "their own",
                            front, pair_text(list[i], list[k]));
      }
  }
}

void refuse_untrainable(const std::string& name, const at::Tensor& tensor) {
  if (!tensor.requires_grad()) return;
  require<UsageError>(tensor.is_leaf(),
                      "parameter '{}' is not a "
                      "leaf: it was computed from other tensors, and backward "
                      "leaves no gradient in it; allowed: leaves",
                      name);
  require<UsageError>(at::isFloatingType(tensor.scalar_type()),
                      "parameter '{}': {} cannot be trained, allowed: floating-point parameters",
                      name, at::toString(tensor.scalar_type()));
  require<UsageError>(tensor.layout() == at::kStrided,
                      "parameter '{}' is sparse, allowed: dense parameters", name);
  require<UsageError>(!may_overlap(tensor),
                      "parameter '{}' has elements that share memory, allowed: elements of their "
                      "own (clone() gives them)",
                      name);
}

}  // namespace lockstep
