#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/core/config.h"

/// Stage 1 of a gradient's path: where each parameter is placed in its buffer. A pure function,
/// with the offsets of Megatron Core's _compute_per_buffer_param_layout. All numbers count
/// elements.
namespace lockstep {

/// One parameter, in the order of registration.
struct LayoutParam {
  int64_t numel = 0;
  /// A tied parameter, or one whose gradient is partial over pipeline stages. With the distributed
  /// optimizer it has a bucket of its own, so that the shards of its copies line up across pipeline
  /// stages.
  bool shared_embedding = false;
  /// The rows of a matrix, whose last dimension is the columns; 0 for other parameters. Used only
  /// by layouts of whole parameters.
  int64_t rows = 0;
  int64_t columns = 0;
};

/// Where the matrices that the optimizer may update as a whole (ParamUpdate::matrix) are placed.
enum class MatrixLayout {
  cut,    ///< among the other parameters; shards of the distributed optimizer cut them
  whole,  ///< in buffers of their own, and no shard cuts one: for Muon
};

/// "cut", "whole"
const char* to_string(MatrixLayout layout);

struct LayoutOptions {
  /// A bucket closes once it holds at least this many elements. Unset: one bucket.
  std::optional<int64_t> bucket_size = {};
  /// A bucket also closes before a parameter that would bring it above this many elements; a larger
  /// parameter has a bucket of its own. Unset: no limit.
  std::optional<int64_t> bucket_limit = {};
  /// Align parameters and pad buckets so that every bucket splits into equal shards.
  bool distributed_optimizer = false;
  /// Number of shards of a bucket.
  int64_t data_parallel_size = 1;
  /// With the distributed optimizer: also make buckets multiples of 2^16 elements.
  bool pad_for_high_bus_bandwidth = false;
  /// With the distributed optimizer: cut no parameter; see compute_whole_param_layout().
  bool whole_parameters = false;
};

/// Half-open ranges of a buffer. Parameters are placed in reverse order of registration, because
/// backward yields gradients roughly in that order.
struct ParamLayout {
  struct Slot {
    int64_t start = 0;
    int64_t end = 0;
    int64_t bucket = 0;
  };
  struct Bucket {
    int64_t start = 0;
    int64_t end = 0;
    /// Elements without the padding at the bucket's end; alignment gaps between parameters count.
    int64_t numel_unpadded = 0;
    /// Indices of the parameters, in buffer order.
    std::vector<int64_t> params;
  };

  std::vector<Slot> slots;  ///< by index of registration
  std::vector<Bucket> buckets;
  int64_t numel = 0;
  int64_t numel_unpadded = 0;
};

/// The bucket size of a buffer of `numel` elements over `dp_cp` ranks: as configured, otherwise
/// Megatron Core's default, max(40000000, 1000000 * dp_cp) with overlap and one bucket without.
std::optional<int64_t> effective_bucket_size(const DistributedDataParallelConfig& config,
                                             int64_t numel, int64_t dp_cp);

/// Start of a parameter that may begin at `offset` or later: 64-element alignment. UsageError if
/// it does not fit into 64 bits.
int64_t pad_param_start(int64_t offset);

/// End of a bucket whose parameters end at `offset`: a multiple of lcm(data_parallel_size, 128),
/// and of 65536 too for high bus bandwidth.
int64_t pad_bucket_end(int64_t offset, int64_t data_parallel_size, bool high_bus_bandwidth);

/// The layout of one buffer. UsageError: a negative size, a bucket size or shard count below 1, an
/// offset that does not fit into 64 bits.
ParamLayout compute_param_layout(const std::vector<LayoutParam>& params,
                                 const LayoutOptions& options);

}  // namespace lockstep
