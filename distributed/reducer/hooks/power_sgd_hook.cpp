#include "lockstep/distributed/power_sgd_hook.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

at::Tensor orthonormal(const at::Tensor& columns) {
  return std::get<0>(at::linalg_qr(columns, "reduced"));
}

int64_t columns_of(const at::Tensor& gradient) { return gradient.numel() / gradient.size(0); }

/// Tensors that are sent as one.
struct Packed {
  Packed(const GradBucket& bucket, const std::vector<at::Tensor>& tensors, const char* what) {
    if (tensors.empty()) return;
    std::vector<at::Tensor> flat;
    for (const at::Tensor& tensor : tensors) flat.push_back(tensor.reshape({-1}));
    values = at::cat(flat).to(bucket.buffer.scalar_type());
    work = all_reduce(bucket.group, values, {ReduceOp::sum, 1, bucket.divisor},
                      fmt::format("{}, {}", bucket.label(), what));
  }

  /// Waits, and writes the parts into `tensors`.
  void unpack(const std::vector<at::Tensor>& tensors) {
    work.wait();
    int64_t offset = 0;
    for (const at::Tensor& tensor : tensors) {
      tensor.copy_(values.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
      offset += tensor.numel();
    }
  }

  at::Tensor values;
  Work work;
};

}  // namespace

/// A gradient during compression.
struct PowerSgdHook::Matrix {
  std::string name;
  at::Tensor gradient;  ///< part of the bucket
  at::Tensor m = {}, p = {}, q = {};
};

PowerSgdHook::PowerSgdHook(const PowerSgdOptions& options) : options_(options) {
  require<ConfigError>(
      options.rank >= 1 && options.start_iteration >= 0 && options.min_compression_rate > 0,
      "PowerSGD: found rank {}, start_iteration {}, min_compression_rate {}, allowed: >= 1, >= 0, "
      "> 0",
      options.rank, options.start_iteration, options.min_compression_rate);
}

std::string PowerSgdHook::name() const { return fmt::format("powerSGD(rank {})", options_.rank); }

std::string PowerSgdHook::identity() const {
  const PowerSgdOptions& o = options_;
  return fmt::format(
      "powerSGD(rank {}, start_iteration {}, min_compression_rate {}, use_error_feedback {}, "
      "warm_start {}, seed {})",
      o.rank, o.start_iteration, o.min_compression_rate, o.use_error_feedback, o.warm_start,
      o.seed);
}

bool PowerSgdHook::is_compressed(const at::Tensor& gradient) const {
  if (gradient.dim() < 2 || gradient.numel() == 0) return false;
  const int64_t rows = gradient.size(0), columns = columns_of(gradient);
  const int64_t rank = std::min({rows, columns, options_.rank});
  return static_cast<double>((rows + columns) * rank) * options_.min_compression_rate <
         static_cast<double>(rows * columns);
}

PowerSgdHook::Matrix PowerSgdHook::begin(const std::string& name, const at::Tensor& gradient) {
  const int64_t rows = gradient.size(0), columns = columns_of(gradient);
  const bool is_double = gradient.scalar_type() == at::kDouble;
  Memory& memory = memory_[name];
  Matrix matrix{.name = name, .gradient = gradient};
  matrix.m =
      gradient.reshape({rows, columns}).to(is_double ? at::kDouble : at::kFloat, false, true);
  if (memory.error.defined()) matrix.m.add_(memory.error);
  if (!memory.q.defined()) {
    const std::vector<int64_t> shape = {columns, std::min({rows, columns, options_.rank})};
    memory.q = at::empty(shape, matrix.m.options());
    const auto iteration = static_cast<uint64_t>(iteration_);
    fill_normal(memory.q, 1.0, options_.seed + iteration, name, shape);
  }
  matrix.q = orthonormal(memory.q);
  matrix.p = matrix.m.matmul(matrix.q);
  return matrix;
}

void PowerSgdHook::end(Matrix& matrix) {
  const at::Tensor approximation = matrix.p.matmul(matrix.q.t());
  matrix.gradient.copy_(approximation.view(matrix.gradient.sizes()));
  Memory& memory = memory_[matrix.name];
  // Equal on all ranks, because they have the same factors.
  const at::Tensor finite = matrix.q.isfinite().all();
  memory.q = options_.warm_start ? at::where(finite, matrix.q, memory.q) : at::Tensor();
  if (!options_.use_error_feedback) return;
  const at::Tensor error = matrix.m.sub_(approximation);
  if (!memory.error.defined()) memory.error = at::zeros_like(error);
  at::where_out(memory.error, finite, error, memory.error);
}

CommHook::Finish PowerSgdHook::start(const GradBucket& bucket) {
  if (bucket.index <= last_index_) ++iteration_;
  last_index_ = bucket.index;
  if (bucket.buffer.layout() == at::kSparse || iteration_ < options_.start_iteration)
    return plain_.start(bucket);
  const at::NoGradGuard no_grad;
  std::vector<Matrix> matrices;
  std::vector<at::Tensor> plain, ps;
  const std::vector<at::Tensor> gradients = bucket.gradients();
  for (size_t i = 0; i < gradients.size(); ++i) {
    if (is_compressed(gradients[i])) {
      matrices.push_back(begin((*bucket.parameters)[i].name, gradients[i]));
      ps.push_back(matrices.back().p);
    } else {
      plain.push_back(gradients[i]);
    }
  }
  return [this, bucket, matrices, plain, ps, packed_plain = Packed(bucket, plain, "uncompressed"),
          packed_p = Packed(bucket, ps, "P")]() mutable {
    const at::NoGradGuard no_grad_here;
    packed_p.unpack(ps);
    std::vector<at::Tensor> qs;
    for (Matrix& matrix : matrices) {
      matrix.p = orthonormal(matrix.p);
      matrix.q = matrix.m.t().matmul(matrix.p);
      qs.push_back(matrix.q);
    }
    Packed(bucket, qs, "Q").unpack(qs);
    for (Matrix& matrix : matrices) end(matrix);
    packed_plain.unpack(plain);
    return bucket.buffer;
  };
}

}  // namespace lockstep
