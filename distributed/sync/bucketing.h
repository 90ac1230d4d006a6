#pragma once

// Internal: from parameters and configuration to buffers and bucket groups.

#include <memory>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/distributed/block_pool.h"
#include "lockstep/distributed/bucket_group.h"
#include "lockstep/distributed/grad_sync_state.h"
#include "lockstep/distributed/param_and_grad_buffer.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// The buffers of a model and the groups of buckets that cover them, in launch order.
struct Bucketing {
  std::vector<std::unique_ptr<ParamAndGradBuffer>> buffers;
  std::vector<BucketGroup> groups;

  /// One bucket of one buffer.
  struct Piece {
    size_t buffer = 0;
    size_t bucket = 0;
    int64_t last_expected = 0;  ///< position of the parameter whose gradient is expected last
  };
  std::vector<Piece> pieces;  ///< all buckets, in launch order

  /// The parameters in the order of buffers and of registration inside a buffer, each with the
  /// position of its bucket group.
  std::vector<GradSyncState::Param> params;

  /// Where each of `params` is stored.
  struct Place {
    ParamAndGradBuffer* buffer = nullptr;
    size_t index = 0;  ///< in the buffer
    size_t group = 0;
  };
  std::vector<Place> places;

  std::vector<int64_t> units;  ///< of each buffer: BufferPlan::unit

  /// The pool of buffers that lend their memory; otherwise null.
  std::shared_ptr<BlockPool> pool;
  bool lends_grads() const { return pool != nullptr; }
};

/// One buffer: its parameters, and how their gradients are reduced.
struct BufferPlan {
  std::vector<NamedParameter> params;  ///< in the order of registration
  /// When the gradient of each is expected: backward yields those with high numbers first. Counted
  /// over all buffers.
  std::vector<int64_t> positions;
  at::ScalarType grad_dtype;
  GradReduction reduction;
  LayoutOptions layout = {};
  BufferContents contents = BufferContents::params_and_grads;
  LentMemory lent = LentMemory::none;
  int64_t unit = 0;  ///< UnitPiece::unit, where parameters are lent
};

/// Allocates the buffers and cuts them into buckets. The bucket whose gradients are expected first
/// goes first; the order follows from the plans alone. `overlap`: every bucket is a group.
///
/// Ranks of one reduction may share other reductions with other ranks, whose buffers are cut
/// elsewhere. They still agree, because what they compare follows from what the ranks of one
/// reduction share: the number in a bucket's label counts the buckets of the same ranks, and
/// buckets are launched by the position of their last gradient, a number that all ranks of a bucket
/// know. So one order of all collectives fits every rank, and none waits for another in a circle.
Bucketing make_bucketing(const std::vector<BufferPlan>& plans, bool overlap, GradChecks checks);

/// Allocates the buffers of the parameters that require a gradient, one for each (parameter dtype,
/// gradient dtype, BufferKind), and cuts them into buckets. The launch order depends on the
/// order of registration alone, so it is the same on all ranks: the bucket whose gradients are
/// expected first goes first. `disable_bucketing`: one bucket for each buffer, whatever the
/// configuration says. A pipeline stage without a trained parameter gets no buffer. UsageError: no
/// trained parameter, and one stage; a gradient that is not a term of a sum over data- or
/// context-parallel ranks.
///
/// What is reduced over a further axis is stored at the same places on all of its ranks. Where
/// parameters are partial over tp, etp or ep, the ranks compare how they lay out their buffers (16
/// bytes each over the axis). If the layouts differ, because one rank holds a longer piece of a
/// table, those parameters get buffers of their own, one for each set of axes. Parameters that are
/// partial over pp always do, since other stages hold other parameters.
Bucketing make_bucketing(const std::vector<NamedParameter>& parameters,
                         const ParallelState& parallel_state,
                         const DistributedDataParallelConfig& config, GradientScalingMode mode,
                         bool disable_bucketing, MatrixLayout matrices = MatrixLayout::cut,
                         const std::vector<int64_t>& units = {});

}  // namespace lockstep
