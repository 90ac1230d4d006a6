#pragma once

// Internal: which parameters on meshes share a buffer, and in which order ranks make the buffers.

#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/parameters.h"
#include "lockstep/distributed/bucketing.h"
#include "lockstep/distributed/gradient_scaling.h"
#include "lockstep/distributed/mesh_parameters.h"
#include "lockstep/parallel_state/device_mesh.h"

namespace lockstep {

/// The properties that all parameters of a buffer share.
struct MeshBufferKey {
  size_t param_group;
  c10::Device device;
  at::ScalarType grad_dtype;
  RankList ranks;
  ScalingFactor factor;
  bool operator==(const MeshBufferKey&) const = default;
};

/// Parameters that are compared together and, unless `only_compared`, share a buffer.
struct MeshBufferCandidate {
  MeshBufferKey key;
  bool only_compared;
  DeviceMesh mesh;
  std::vector<std::string> axes;  ///< of `mesh`, over which key.ranks lie
  std::vector<NamedParameter> params = {};
  std::vector<ParamDescription> descriptions = {};  ///< of params
  std::vector<int64_t> positions = {};
  std::string complete = {};  ///< where gradients are complete, in words
  std::optional<BufferPlan> plan = {};
};

/// The order does not depend on any parameter list, so that ranks never wait for each other in a
/// circle. Larger groups come first, so that ranks that disagree on complete axes meet in the group
/// that holds both.
std::vector<MeshBufferCandidate*> in_order(std::vector<MeshBufferCandidate>& candidates);

/// The dtype of the gradient of `param`. UsageError, naming it, if none is set.
at::ScalarType mesh_grad_dtype(const MeshParameter& param);

/// Elements of `dtype` in a bucket of `megabytes` MiB; at least one.
int64_t bucket_limit(double megabytes, at::ScalarType dtype);

/// The position of a parameter, number `index` of `size` in its group, on one scale for groups of
/// any size, because backward goes through all groups at once.
int64_t expected_position(size_t index, size_t size);

/// Gives each parameter of `plan` its highest position on any rank: the ranks of its group may hold
/// different further parameters, but must order their buckets alike.
void agree_on_positions(BufferPlan& plan);

}  // namespace lockstep
