#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/distributed/buffer_kind.h"
#include "lockstep/optimizer/update_statement.h"
#include "lockstep/planner/stage_shapes.h"

/// The gradient buffers of a job, from its configuration. Needs no libtorch.
namespace lockstep {

/// A buffer of one rank. Numbers count elements.
struct PlannedBuffer {
  BufferKind kind;
  GroupKind group = GroupKind::dp_cp;  ///< ReductionKinds::group
  int64_t parameters = 0;              ///< without padding
  LayoutOptions options;               ///< among them the number of shards
  ParamLayout layout;
  int64_t unit = 0;           ///< see number_units()
  size_t position = 0;        ///< of its first parameter among those of the chunk
  bool lends_grads = false;   ///< whole gradients have memory only while they are used
  bool lends_params = false;  ///< the same for whole parameters
};

/// The buffers of `chunk`, which is chunk number `index` of pipeline stage `stage`, in the order of
/// their kinds. Where ddp.data_parallel_sharding_strategy shards gradients, each piece of
/// unit_pieces() is a buffer. Parameters that are not trained are in none of them. `rule` as in
/// plan_memory(). UsageError if a size does not fit into 64 bits.
std::vector<PlannedBuffer> chunk_buffers(const Config& config, const RankGrids& grids,
                                         const ModelChunk& chunk, int64_t stage, int64_t index,
                                         const UpdateStatement* rule = nullptr);

}  // namespace lockstep
