#include "lockstep/checkpoint/tensor_box.h"

#include <algorithm>
#include <map>
#include <set>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"

namespace lockstep {
namespace {

std::vector<int64_t> strides_of(const std::vector<int64_t>& size) {
  std::vector<int64_t> strides(size.size(), 1);
  for (size_t d = size.size(); d-- > 1;) strides[d - 1] = strides[d] * size[d];
  return strides;
}

/// The elements that two blocks have in common.
struct Intersection {
  std::vector<int64_t> begin;
  std::vector<int64_t> end;
  size_t outer = 0;  ///< dimensions that are stepped through; a run holds the others
  int64_t run = 1;
  bool empty = false;
};

Intersection intersect(const TensorBox& a, const TensorBox& b) {
  Intersection common;
  const size_t dims = a.shape.size();
  for (size_t d = 0; d < dims; ++d) {
    common.begin.push_back(std::max(a.start[d], b.start[d]));
    common.end.push_back(std::min(a.start[d] + a.size[d], b.start[d] + b.size[d]));
    common.empty = common.empty || common.begin[d] >= common.end[d];
  }
  common.outer = dims;
  while (common.outer > 0) {
    const size_t d = --common.outer;
    const int64_t length = common.end[d] - common.begin[d];
    common.run *= length;
    if (length != a.size[d] || length != b.size[d]) break;
  }
  return common;
}

/// Position of the element at `place` in the flattened block.
int64_t position(const TensorBox& box, const std::vector<int64_t>& strides,
                 const std::vector<int64_t>& place) {
  int64_t at = 0;
  for (size_t d = 0; d < place.size(); ++d) at += (place[d] - box.start[d]) * strides[d];
  return at;
}

/// Why the blocks are not the cells of a grid, each once; "" if they are.
std::string grid_error(const std::vector<int64_t>& shape, const std::vector<TensorBox>& boxes) {
  int64_t cells = 1;
  for (size_t d = 0; d < shape.size(); ++d) {
    std::set<int64_t> cuts = {shape[d]};
    for (const TensorBox& box : boxes) cuts.insert(box.start[d]);
    if (shape[d] > 0 && *cuts.begin() != 0)
      return fmt::format("nothing holds the front of dimension {}", d);
    for (const TensorBox& box : boxes) {
      const auto next = cuts.upper_bound(box.start[d]);
      const int64_t end = next == cuts.end() ? shape[d] : *next;
      if (box.start[d] + box.size[d] != end)
        return fmt::format("block {} should end at {} in dimension {}", to_string(box), end, d);
    }
    const auto count = std::max<int64_t>(1, static_cast<int64_t>(cuts.size()) - 1);
    if (__builtin_mul_overflow(cells, count, &cells)) return "too many blocks";
  }
  if (cells != static_cast<int64_t>(boxes.size()))
    return fmt::format("{} blocks, but {} are needed", boxes.size(), cells);
  return "";
}

}  // namespace

int64_t TensorBox::numel() const {
  int64_t count = 1;
  for (const int64_t length : size) count *= length;
  return count;
}

TensorBox whole_box(const std::vector<int64_t>& shape) {
  return {shape, std::vector<int64_t>(shape.size(), 0), shape};
}

TensorBox box_of(const std::vector<int64_t>& local_shape, const std::vector<BoxShard>& shards) {
  TensorBox box = whole_box(local_shape);
  for (size_t i = shards.size(); i-- > 0;) {
    const BoxShard& shard = shards[i];
    require<UsageError>(shard.dim >= 0 && shard.dim < static_cast<int64_t>(local_shape.size()) &&
                            shard.index >= 0 && shard.index < shard.count,
                        "box_of: shard {} of {} of dimension {} of a tensor of {} dimensions",
                        shard.index, shard.count, shard.dim, local_shape.size());
    const auto d = static_cast<size_t>(shard.dim);
    box.start[d] += shard.index * box.shape[d];
    box.shape[d] = checked_mul(box.shape[d], shard.count, "box_of");
  }
  return box;
}

void for_each_overlap(const TensorPart& target, const TensorPart& source,
                      const std::function<void(int64_t, int64_t, int64_t)>& visit) {
  const Intersection common = intersect(target.box, source.box);
  if (common.empty) return;
  const auto target_strides = strides_of(target.box.size);
  const auto source_strides = strides_of(source.box.size);
  std::vector<int64_t> place = common.begin;
  for (;;) {
    const int64_t in_target = position(target.box, target_strides, place);
    const int64_t in_source = position(source.box, source_strides, place);
    const int64_t begin =
        std::max({int64_t{0}, target.range.first - in_target, source.range.first - in_source});
    const int64_t end =
        std::min({common.run, target.range.last - in_target, source.range.last - in_source});
    if (begin < end) visit(in_target + begin, in_source + begin, end - begin);
    size_t d = common.outer;
    while (d > 0 && ++place[d - 1] == common.end[d - 1]) {
      place[d - 1] = common.begin[d - 1];
      --d;
    }
    if (d == 0) return;
  }
}

std::string tiling_error(const std::vector<int64_t>& shape, const std::vector<TensorPart>& parts) {
  std::map<TensorBox, std::vector<FlatRange>> ranges;
  for (const TensorPart& part : parts) ranges[part.box].push_back(part.range);
  std::vector<TensorBox> boxes;
  for (auto& [box, of_box] : ranges) {
    boxes.push_back(box);
    std::sort(of_box.begin(), of_box.end());
    int64_t end = 0;
    for (const FlatRange& range : of_box) {
      if (range.first > end)
        return fmt::format("elements {} to {} of block {} are missing", end, range.first - 1,
                           to_string(box));
      if (range.first < end)
        return fmt::format("element {} of block {} appears twice", range.first, to_string(box));
      end = range.last;
    }
    if (end != box.numel())
      return fmt::format("block {} has {} elements, of which {} are there", to_string(box),
                         box.numel(), end);
  }
  if (boxes.empty()) return "no part of it is there";
  return grid_error(shape, boxes);
}

std::string to_string(const TensorBox& box) {
  std::string text;
  for (size_t d = 0; d < box.size.size(); ++d)
    text += fmt::format("{}{}:{}", d ? ", " : "", box.start[d], box.start[d] + box.size[d]);
  return "[" + text + "]";
}

}  // namespace lockstep
