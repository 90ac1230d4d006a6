#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

#include "lockstep/parallel_state/collectives.h"

namespace lockstep {

/// What a collective does with gradients.
struct GradOperation {
  enum class Kind {
    all_reduce,
    reduce_scatter,
    sparse_all_reduce,
    broadcast,
    hook,  ///< a communication hook of a Reducer decides
  };
  Kind kind = Kind::all_reduce;
  ReduceOp op = ReduceOp::sum;  ///< of the kinds that reduce
  bool operator==(const GradOperation&) const = default;
};

inline constexpr GradOperation kAllReduceSum = {};

/// "all-reduce sum", "reduce-scatter average", "broadcast", "hook"
std::string to_string(const GradOperation& operation);

/// How one bucket of gradients is reduced. This record is made in every step and holds no text.
struct BucketReduction {
  ProcessGroup group;
  GradOperation operation = {};
  int64_t bytes = 0;
  int64_t num_parameters = 0;
  /// With several optimizer instances, the group over which an all-reduce adds the shards.
  std::optional<ProcessGroup> instances = {};
  int64_t instance_bytes = 0;  ///< what that all-reduce adds
};

/// One bucket of gradients, as a front describes it.
struct BucketInfo : BucketReduction {
  std::string label;     ///< "bucket 2 ('layers.0.weight' to 'layers.1.bias')"
  at::ScalarType dtype;  ///< of the gradients
  int64_t numel;
  std::vector<std::string> parameters;  ///< in buffer order
  std::string hook = {};                ///< name of the communication hook; empty: none
};

/// A line for each bucket.
std::string to_string(const std::vector<BucketInfo>& buckets);

}  // namespace lockstep
