#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/placement.h"
#include "lockstep/parallel_state/device_mesh.h"

namespace lockstep {

/// A tensor placed on a mesh: this rank's part, the global shape, and one placement for each mesh
/// axis. Names and results are those of PyTorch's DTensor; it has no operators. If several axes
/// shard the same dimension, they cut it one after the other, the first axis of the mesh first.
/// Every cut is that of torch.chunk, so the last ranks may hold less, or nothing.
///
/// Collectives run on the backend of the local tensor's device: NCCL for CUDA; for the CPU see
/// collectives.h.
/// Nothing is recorded for autograd. A handle: copies share the local tensor.
///
/// Every call that takes placements throws UsageError if there is not one placement for each mesh
/// axis, if a dimension does not exist, if different kinds of Partial are mixed (other than sum
/// with avg), for Partial(avg) of integers, and if this rank is not in the mesh.
class DTensor {
 public:
  /// `local` is this rank's part and must have the same size on every rank; the global shape
  /// follows from it (size times ranks in sharded dimensions). A dimension of Shard may be
  /// negative.
  static DTensor from_local(at::Tensor local, DeviceMesh mesh, std::vector<Placement> placements);

  /// The same for parts that may be uneven or empty: `shape` is the global shape. UsageError if
  /// `local` does not have the shape of this rank's part.
  static DTensor from_local(at::Tensor local, DeviceMesh mesh, std::vector<Placement> placements,
                            std::vector<int64_t> shape);

  /// This rank's part as it is stored; for Partial, one of the terms.
  const at::Tensor& to_local() const { return local_; }

  /// The same tensor with other placements. All ranks of the mesh must call it. Partial can be a
  /// target only on an axis where it is the source too. Each axis whose placement changes takes one
  /// collective: an all-reduce (Partial to Replicate), a reduce-scatter (Partial to Shard), an
  /// all-gather (Shard to Replicate), an all-to-all (Shard to another dimension), or none
  /// (Replicate to Shard, and axes of one rank). If axes to the left now cut the dimension in
  /// different places, a shard first becomes a replica. Uneven chunks are padded, except in the
  /// all-to-all. The result shares memory with this one if nothing had to change.
  DTensor redistribute(const std::vector<Placement>& placements) const;

  /// The whole tensor, on every rank: redistribute() to Replicate on all axes, then to_local().
  at::Tensor full_tensor() const;

  /// Compares shape, dtype and placements with the other ranks of the mesh, which must call it too.
  /// It takes one all-gather of 8 bytes per rank. If they differ, all ranks throw UsageError,
  /// naming the first rank that differs from the first rank of the mesh. Values are not compared.
  void run_check() const;

  const DeviceMesh& device_mesh() const { return mesh_; }
  const std::vector<Placement>& placements() const { return placements_; }
  /// Shape of the whole tensor.
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t ndim() const { return static_cast<int64_t>(shape_.size()); }
  at::ScalarType dtype() const { return local_.scalar_type(); }
  /// The position in the whole tensor at which the local part begins; if it is empty, the end of
  /// the dimension.
  std::vector<int64_t> local_offset() const;

  /// "DTensor [5, 3] Double (Shard(0), Replicate) on dp=2 x tp=2"
  std::string to_string() const;

 private:
  DTensor(at::Tensor local, DeviceMesh mesh, std::vector<Placement> placements,
          std::vector<int64_t> shape);

  at::Tensor local_;
  DeviceMesh mesh_;
  std::vector<Placement> placements_;
  std::vector<int64_t> shape_;
};

/// This rank's part of `full`, which must be the same on all ranks of the mesh. Nothing is sent.
/// The terms of a Partial placement combine to `full`: over n ranks each is full / n for sum, and
/// `full` itself for the other operations. UsageError also for Partial(sum) of integers over
/// several ranks.
DTensor distribute_tensor(const at::Tensor& full, const DeviceMesh& mesh,
                          std::vector<Placement> placements);

}  // namespace lockstep
