#include "lockstep/models/overlapped_product.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/kernels/matrix_product.h"
#include "lockstep/models/fp8_scaling.h"
#include "lockstep/models/gathering.h"

namespace lockstep {
namespace {

/// The factor, prepared once for the products of all parts.
class Multiplier {
 public:
  Multiplier(const ProductFactor& factor, const ParallelLinearOptions& options)
      : factor_(factor), fp8_(options.fp8), columns_(factor.matrix.t().unsqueeze(0)) {
    if (fp8_) narrowed_ = fp8_->narrowed_weight(factor.matrix, factor.notes_largest);
  }

  int64_t width() const { return factor_.matrix.size(0); }

  /// result[i] = x[i] times the factor: x [n, rows, in], result [n, rows, out]. The rows of each
  /// `i` are contiguous.
  void multiply(const at::Tensor& x, at::Tensor result) const {
    if (x.size(0) == 0 || x.size(1) == 0) return;
    if (fp8_) return multiply_narrowed(x, result);
    if (x.size(0) == 1 || kernels::onednn_multiplies(x)) return multiply_rows(x, result);
    const at::Tensor all = columns_.expand({x.size(0), -1, -1});
    if (factor_.bias)
      at::baddbmm_out(result, factor_.bias->expand_as(result), x, all);
    else
      at::bmm_out(result, x, all);
  }

 private:
  void multiply_rows(const at::Tensor& x, const at::Tensor& result) const {
    for (int64_t i = 0; i < x.size(0); ++i)
      kernels::linear_product_into(result[i], x[i], factor_.matrix, factor_.bias);
  }

  void multiply_narrowed(const at::Tensor& x, const at::Tensor& result) const {
    for (int64_t i = 0; i < x.size(0); ++i)
      result[i].copy_(fp8_->output(x[i], narrowed_, factor_.bias, factor_.notes_largest));
  }

  const ProductFactor& factor_;
  std::shared_ptr<const Fp8Layer> fp8_;
  at::Tensor columns_;  ///< [1, in, out]
  kernels::Fp8Matrix narrowed_;
};

/// `x` [chunks * positions, ..., width] as [chunks, rows of a chunk, width].
at::Tensor as_chunks(const at::Tensor& x, int64_t chunks) {
  return x.view({chunks, x.numel() / std::max<int64_t>(1, x.size(-1)) / chunks, x.size(-1)});
}

/// The rows of a part in each chunk of `chunks` [n, rows, width].
at::Tensor rows_of(const at::Tensor& chunks, const SequencePart& part, int64_t rows_of_position) {
  return chunks.narrow(1, part.first * rows_of_position, part.count * rows_of_position);
}

at::Tensor make_result(const at::Tensor& x, int64_t positions, int64_t width) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.front() = positions;
  shape.back() = width;
  return at::empty(shape, x.options());
}

int64_t rows_of_position(const at::Tensor& x) {
  return c10::multiply_integers(x.sizes().slice(1, static_cast<size_t>(x.dim() - 2)));
}

}  // namespace

std::vector<SequencePart> sequence_parts(int64_t positions) {
  const int64_t count = std::min(kOverlapParts, positions);
  std::vector<SequencePart> parts;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = positions * i / count;
    parts.push_back({first, positions * (i + 1) / count - first});
  }
  return parts;
}

at::Tensor gathered_product(const at::Tensor& chunk, const ProductFactor& factor,
                            const ParallelLinearOptions& options) {
  const int64_t ranks = options.group.size(), rank = options.group.rank();
  const at::Tensor own = chunk.detach().contiguous();
  const std::vector<SequencePart> parts = sequence_parts(own.size(0));
  std::vector<Gathering> gatherings;
  for (const SequencePart& part : parts)
    gatherings.emplace_back(own.narrow(0, part.first, part.count), options, options.label.input());

  const Multiplier multiplier(factor, options);
  const at::Tensor result = make_result(own, ranks * own.size(0), multiplier.width());
  const at::Tensor chunks = as_chunks(result, ranks);
  multiplier.multiply(as_chunks(own, 1), chunks.narrow(0, rank, 1));
  for (size_t i = 0; i < parts.size(); ++i) {
    gatherings[i].work.wait();
    const at::Tensor x = as_chunks(gatherings[i].whole, ranks);
    const at::Tensor products = rows_of(chunks, parts[i], rows_of_position(own));
    for (const auto& [first, end] : {std::pair(int64_t{0}, rank), std::pair(rank + 1, ranks)})
      multiplier.multiply(x.slice(0, first, end), products.slice(0, first, end));
  }
  return result;
}

at::Tensor summed_product(const at::Tensor& x, const ProductFactor& factor,
                          const ParallelLinearOptions& options) {
  const bool cut = options.output == LinearOutput::sequence_chunk;
  const int64_t chunks = cut ? options.group.size() : 1;
  require<UsageError>(x.size(0) % chunks == 0,
                      "{}: found a sequence of {} over group {}, allowed: a multiple of {}",
                      options.label.layer(), x.size(0), options.group.to_string(), chunks);
  const at::Tensor whole = x.detach().contiguous(), terms_of = as_chunks(whole, chunks);
  const Multiplier multiplier(factor, options);
  const at::Tensor result = make_result(whole, x.size(0) / chunks, multiplier.width());
  std::vector<Work> works;
  for (const SequencePart& part : sequence_parts(result.size(0))) {
    const at::Tensor rows = rows_of(terms_of, part, rows_of_position(whole));
    const at::Tensor sum = result.narrow(0, part.first, part.count);
    const at::Tensor terms =
        cut ? at::empty({chunks, rows.size(1), multiplier.width()}, x.options())
            : as_chunks(sum, 1);
    multiplier.multiply(rows, terms);
    works.push_back(
        cut ? reduce_scatter(options.group, sum, terms, ReduceOp::sum, options.label.output())
            : all_reduce(options.group, sum, ReduceOp::sum, options.label.output()));
  }
  for (Work& work : works) work.wait();
  return result;
}

}  // namespace lockstep
