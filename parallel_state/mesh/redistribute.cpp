#include "lockstep/parallel_state/redistribute.h"

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/shard_layout.h"

namespace lockstep {
namespace {

/// A change of placement that is under way.
struct Change {
  const at::Tensor& local;
  const ProcessGroup& group;
  const std::string& label;

  int64_t count() const { return group.size(); }
  Chunk chunk(int64_t length, int64_t index) const { return chunk_of(length, count(), index); }
  Chunk mine(int64_t length) const { return chunk(length, group.rank()); }
};

/// The shape of `tensor` with another size of `dim`.
std::vector<int64_t> resized(const at::Tensor& tensor, int64_t dim, int64_t size) {
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape[static_cast<size_t>(dim)] = size;
  return shape;
}

/// The shape of a chunk of `shape` for each rank: [ranks, shape].
std::vector<int64_t> for_all_ranks(const Change& change, std::vector<int64_t> shape) {
  shape.insert(shape.begin(), change.count());
  return shape;
}

at::Tensor reduce_terms(const Change& change, const Partial& from) {
  at::Tensor result = change.local.clone(at::MemoryFormat::Contiguous);
  if (result.numel() > 0) all_reduce(change.group, result, from.op, change.label).wait();
  return result;
}

at::Tensor reduce_and_cut(const Change& change, const Partial& from, int64_t dim) {
  const int64_t length = change.local.size(dim);
  at::Tensor output = at::empty(resized(change.local, dim, ceil_div(length, change.count())),
                                change.local.options());
  at::Tensor input;
  if (dim == 0 && length % change.count() == 0) {
    input = change.local.contiguous();
  } else {
    input = at::zeros(for_all_ranks(change, output.sizes().vec()), output.options());
    for (int64_t i = 0; i < change.count(); ++i) {
      const Chunk chunk = change.chunk(length, i);
      input[i].narrow(dim, 0, chunk.size).copy_(change.local.narrow(dim, chunk.start, chunk.size));
    }
  }
  if (output.numel() > 0) reduce_scatter(change.group, output, input, from.op, change.label).wait();
  return output.narrow(dim, 0, change.mine(length).size).contiguous();
}

at::Tensor gather(const Change& change, int64_t dim, int64_t length) {
  const std::vector<int64_t> full = resized(change.local, dim, ceil_div(length, change.count()));
  at::Tensor input = change.local.contiguous();
  if (input.sizes() != at::IntArrayRef(full)) {
    input = at::zeros(full, change.local.options());
    input.narrow(dim, 0, change.local.size(dim)).copy_(change.local);
  }
  const at::Tensor output = at::empty(for_all_ranks(change, full), input.options());
  if (input.numel() > 0) all_gather(change.group, output, input, change.label).wait();
  if (dim == 0) return output.flatten(0, 1).narrow(0, 0, length);
  std::vector<at::Tensor> pieces;
  for (int64_t i = 0; i < change.count(); ++i)
    pieces.push_back(output[i].narrow(dim, 0, change.chunk(length, i).size));
  return at::cat(pieces, dim);
}

at::Tensor exchange(const Change& change, int64_t from_dim, int64_t length, int64_t to_dim) {
  const int64_t to_length = change.local.size(to_dim);
  std::vector<at::Tensor> sent;
  std::vector<std::vector<int64_t>> shapes;
  std::vector<int64_t> input_rows, output_rows;
  int64_t received = 0;
  for (int64_t i = 0; i < change.count(); ++i) {
    const Chunk chunk = change.chunk(to_length, i);
    sent.push_back(change.local.narrow(to_dim, chunk.start, chunk.size).reshape(-1));
    input_rows.push_back(sent.back().numel());
    shapes.push_back(resized(change.local, from_dim, change.chunk(length, i).size));
    shapes.back()[static_cast<size_t>(to_dim)] = change.mine(to_length).size;
    output_rows.push_back(c10::multiply_integers(shapes.back()));
    received += output_rows.back();
  }
  const at::Tensor input = at::cat(sent);
  const at::Tensor output = at::empty({received}, change.local.options());
  const bool even = length % change.count() == 0 && to_length % change.count() == 0;
  if (c10::multiply_integers(resized(change.local, from_dim, length)) == 0) {
    // No rank has elements.
  } else if (even) {
    all_to_all(change.group, output, input, change.label).wait();
  } else {
    all_to_all(change.group, output, input, output_rows, input_rows, change.label).wait();
  }
  std::vector<at::Tensor> pieces = output.split_with_sizes(output_rows);
  for (size_t i = 0; i < pieces.size(); ++i) pieces[i] = pieces[i].view(shapes[i]);
  return at::cat(pieces, from_dim);
}

}  // namespace

at::Tensor cut_chunk(const at::Tensor& tensor, int64_t dim, int64_t count, int64_t index) {
  const Chunk chunk = chunk_of(tensor.size(dim), count, index);
  return tensor.narrow(dim, chunk.start, chunk.size).clone(at::MemoryFormat::Contiguous);
}

at::Tensor change_placement(const at::Tensor& local, const Placement& from, const Placement& to,
                            int64_t length, const ProcessGroup& group, const std::string& label) {
  if (group.size() == 1) return local;
  const at::Tensor plain = local.resolve_conj().resolve_neg();  // lazy ones have other bytes
  const Change change = {plain, group, label};
  const auto* to_shard = std::get_if<Shard>(&to);
  if (const auto* partial = std::get_if<Partial>(&from))
    return to_shard ? reduce_and_cut(change, *partial, to_shard->dim)
                    : reduce_terms(change, *partial);
  const int64_t dim = std::get<Shard>(from).dim;
  return to_shard ? exchange(change, dim, length, to_shard->dim) : gather(change, dim, length);
}

}  // namespace lockstep
