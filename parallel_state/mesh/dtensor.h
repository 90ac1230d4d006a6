#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/placement.h"
#include "lockstep/parallel_state/device_mesh.h"

namespace lockstep {

/// A tensor placed on a mesh: this rank's part, the global shape, and one placement for each mesh
/// axis. Names and results are those of PyTorch's DTensor; it has no operators. Axes that shard the same dimension cut it one after the other, the first axis of the mesh
/// first; every cut is that of torch.chunk, so the last ranks may hold less, or nothing.
///
/// Collectives run on the backend of the local tensor's device: NCCL for CUDA, Gloo for the CPU.
/// Nothing is recorded for autograd. A handle: copies share the local tensor.
///
/// UsageError in every call that takes placements: another number than the mesh has axes, a
/// dimension that the tensor has not, Partial of two kinds (other than sum with avg), Partial(avg)
/// of integers; and where this rank is not in the mesh.
class DTensor {
 public:
  /// `local` is this rank's part and must have the same size on every rank; the global shape
  /// follows from it (size times ranks in sharded dimensions). A dimension of Shard may be
  /// negative.
  static DTensor from_local(at::Tensor local, DeviceMesh mesh, std::vector<Placement> placements);

  /// The same where parts may be uneven or empty: `shape` is that of the whole. UsageError if
  /// `local` does not have the shape of this rank's part.
  static DTensor from_local(at::Tensor local, DeviceMesh mesh, std::vector<Placement> placements,
                            std::vector<int64_t> shape);

  /// This rank's part, as it is: for Partial one of the terms.
  const at::Tensor& to_local() const { return local_; }

  /// The same tensor with other placements, for all ranks of the mesh to call. Partial can be a
  /// target only where it is the source too. The collectives are, axis by axis where something
  /// changes: an all-reduce (Partial to Replicate), a reduce-scatter (Partial to Shard), an
  /// all-gather (Shard to Replicate), an all-to-all (Shard to another dimension), none (Replicate
  /// to Shard, and axes of one rank). Where axes on the left cut the dimension in other places than
  /// before, a shard becomes a replica on the way. Uneven chunks are padded, except in the
  /// all-to-all. The result shares memory with this one if nothing had to change.
  DTensor redistribute(const std::vector<Placement>& placements) const;

  /// The whole tensor, on every rank: redistribute() to Replicate on all axes, then to_local().
  at::Tensor full_tensor() const;

  /// Compares shape, type and placements with the other ranks of the mesh, which must call it too:
  /// one all-gather of 8 bytes a rank. UsageError names the first rank that differs from the first
  /// of the mesh, on all ranks. Values are not compared.
  void run_check() const;

  const DeviceMesh& device_mesh() const { return mesh_; }
  const std::vector<Placement>& placements() const { return placements_; }
  /// Shape of the whole tensor.
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t ndim() const { return static_cast<int64_t>(shape_.size()); }
  at::ScalarType dtype() const { return local_.scalar_type(); }
  /// Where the local part begins in the whole tensor; where it is empty, the end of the dimension.
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

/// Cuts `full`, which all ranks of the mesh hold alike, into this rank's part. Nothing is sent.
/// Terms of a Partial placement are such that they combine to `full`: the n-th part of it for sum,
/// `full` itself for the others. UsageError also for Partial(sum) of integers over several ranks.
DTensor distribute_tensor(const at::Tensor& full, const DeviceMesh& mesh,
                          std::vector<Placement> placements);

}  // namespace lockstep
