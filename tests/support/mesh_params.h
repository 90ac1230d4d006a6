#pragma once

#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/distributed/mesh_parameters.h"
#include "lockstep/tests/support/recording_backend.h"

/// Parameters on meshes for the tests of the fronts.
namespace lockstep::testing {

/// A parameter of ones with the whole shape `shape`.
inline MeshParameter ones_on(const DeviceMesh& mesh, std::vector<int64_t> shape,
                             const std::vector<Placement>& placements, const std::string& name,
                             at::ScalarType dtype = at::kFloat) {
  const at::Tensor whole = at::ones(shape, dtype);
  at::Tensor local = distribute_tensor(whole, mesh, placements).to_local().clone();
  local.requires_grad_(true);
  return {DTensor::from_local(local, mesh, placements, std::move(shape)), name};
}

/// Runs a backward that leaves `value` in every element of the gradient of each parameter.
inline void backward_of(const MeshParameters& params, double value) {
  at::Tensor loss = at::zeros({}, at::kDouble).requires_grad_(true);
  for (const MeshParameter& param : params)
    loss = loss + (param.tensor * value).sum().to(at::kDouble);
  loss.backward();
}

/// Whether every element of the gradient is `value`.
inline bool grad_is(const MeshParameter& param, double value) {
  const at::Tensor& grad = param.tensor.grad();
  return grad.defined() && grad.sizes() == param.tensor.sizes() &&
         grad.eq(value).all().item<bool>();
}

/// "operation [ranks] bytes" for each collective of a rank.
inline std::vector<std::string> sent_by(const CollectiveLog& log, int64_t rank) {
  std::vector<std::string> calls;
  for (const CollectiveRecord& call : log.of_rank(rank)) {
    std::string ranks;
    for (const int64_t member : call.ranks)
      ranks += (ranks.empty() ? "" : " ") + std::to_string(member);
    calls.push_back(call.operation + " [" + ranks + "] " + std::to_string(call.bytes));
  }
  return calls;
}

}  // namespace lockstep::testing
