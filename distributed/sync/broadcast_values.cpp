#include "lockstep/distributed/broadcast_values.h"

#include <ATen/ATen.h>

#include "lockstep/distributed/parameter_check.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

/// NaN counts as equal to NaN.
bool are_equal(const at::Tensor& a, const at::Tensor& b) {
  return at::isclose(a, b, /*rtol=*/0, /*atol=*/0, /*equal_nan=*/true).all().item<bool>();
}

void copy_values(at::Tensor tensor, const at::Tensor& values) {
  const at::Tensor places = without_repetition(tensor.detach());
  at::Tensor of_places = values;
  for (int64_t dim = 0; dim < values.dim(); ++dim)
    of_places = of_places.narrow(dim, 0, places.size(dim));
  places.copy_(of_places);
  if (places.numel() < tensor.numel() && !are_equal(tensor, values)) tensor.set_data(values);
}

}  // namespace

void broadcast_values(const ProcessGroup& group, const std::vector<at::Tensor>& tensors,
                      int64_t source, const char* label) {
  std::vector<at::Tensor> contiguous;
  for (const at::Tensor& tensor : tensors) contiguous.push_back(tensor.detach().contiguous());
  broadcast(group, contiguous, source, label).wait();
  for (size_t i = 0; i < tensors.size(); ++i)
    if (contiguous[i].data_ptr() != tensors[i].data_ptr()) copy_values(tensors[i], contiguous[i]);
}

}  // namespace lockstep
