#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

/// Blocks of tensors and flat ranges of them, in integer arithmetic: what a rank holds of a tensor,
/// and what two ranks of different layouts have in common. All numbers count elements.
namespace lockstep {

/// A block of a tensor of `shape`: `size` elements per dimension, starting at `start`. Its elements
/// are counted row by row within the block.
struct TensorBox {
  std::vector<int64_t> shape;
  std::vector<int64_t> start;
  std::vector<int64_t> size;

  /// Elements of the block.
  int64_t numel() const;
  /// Whether the block is the whole tensor.
  bool is_whole() const { return size == shape; }
  auto operator<=>(const TensorBox&) const = default;
};

/// A dimension that is cut into `count` equal parts, of which this is number `index`.
struct BoxShard {
  int64_t dim = 0;
  int64_t index = 0;
  int64_t count = 1;
};

/// The block of `local_shape` that `shards` describe. If several shards cut one dimension, the
/// first cuts first. UsageError: a dimension that the tensor does not have, or an index outside the
/// count.
TensorBox box_of(const std::vector<int64_t>& local_shape, const std::vector<BoxShard>& shards);

/// A whole tensor as a single block.
TensorBox whole_box(const std::vector<int64_t>& shape);

/// A half-open range of a flattened block.
struct FlatRange {
  int64_t first = 0;
  int64_t last = 0;
  int64_t numel() const { return last - first; }
  auto operator<=>(const FlatRange&) const = default;
};

/// A part of a tensor: a flat range of a block.
struct TensorPart {
  TensorBox box;
  FlatRange range;
  auto operator<=>(const TensorPart&) const = default;
};

/// Calls `visit` for each run of elements that both parts hold, with the run's first element in the
/// flattened block of each part, and its length. The parts belong to one tensor.
void for_each_overlap(
    const TensorPart& target, const TensorPart& source,
    const std::function<void(int64_t target_first, int64_t source_first, int64_t count)>& visit);

/// Empty if `parts`, of a tensor of `shape`, hold each of its elements exactly once; otherwise what
/// is wrong. Blocks must form a grid: those of any tensor-parallel layout do.
std::string tiling_error(const std::vector<int64_t>& shape, const std::vector<TensorPart>& parts);

/// "[0:4, 2:6]"
std::string to_string(const TensorBox& box);

}  // namespace lockstep
