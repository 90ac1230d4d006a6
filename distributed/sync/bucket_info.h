#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

namespace lockstep {

/// One bucket of gradients, as a front describes it.
struct BucketInfo {
  std::string label;      ///< "bucket 2 ('layers.0.weight' to 'layers.1.bias')"
  std::string group;      ///< "dp-cp [0, 1]"
  std::string operation;  ///< "all-reduce sum", "reduce-scatter sum"
  /// With several optimizer instances, the group over which an all-reduce adds the shards.
  std::string instances;
  at::ScalarType dtype;  ///< of the gradients
  int64_t numel;
  int64_t bytes;
  std::vector<std::string> parameters;  ///< in buffer order
  int64_t instance_bytes = 0;           ///< what that all-reduce over `instances` adds
};

/// A line for each bucket.
std::string to_string(const std::vector<BucketInfo>& buckets);

}  // namespace lockstep
