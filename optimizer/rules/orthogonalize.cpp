#include "lockstep/optimizer/orthogonalize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

struct Quintic {
  double a, b, c;
};

constexpr std::array<Quintic, 5> kQuintics = {{{4.0848, -6.8946, 2.9270},
                                               {3.9505, -6.3029, 2.6377},
                                               {3.7418, -5.5913, 2.3037},
                                               {2.8769, -3.1427, 1.2046},
                                               {2.8366, -3.0525, 1.2012}}};
constexpr double kLeastNorm = 1e-7;

at::Tensor direction_of_one(const at::Tensor& matrix, const OptimizerConfig& config) {
  return orthogonalize(matrix, config.muon_num_ns_steps) *
         (muon_scale(matrix.size(0), matrix.size(1), config.muon_scale_mode) *
          config.muon_extra_scale_factor);
}

}  // namespace

at::Tensor orthogonalize(const at::Tensor& matrix, int64_t iterations) {
  require<UsageError>(matrix.dim() == 2, "orthogonalize: found {} dimensions, allowed: 2",
                      matrix.dim());
  const bool tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = tall ? matrix.t() : matrix;
  x = x / at::linalg_vector_norm(x).clamp_min(kLeastNorm);
  for (int64_t i = 0; i < iterations; ++i) {
    const auto& [a, b, c] = kQuintics[static_cast<size_t>(i) % kQuintics.size()];
    const at::Tensor gram = x.mm(x.t());
    x = at::addmm(x, at::addmm(gram, gram, gram, b, c), x, a, 1);
  }
  return tall ? x.t() : x;
}

at::Tensor muon_direction(const at::Tensor& matrix, const OptimizerConfig& config,
                          const std::vector<int64_t>& rows_of_matrices) {
  if (rows_of_matrices.empty() || !config.muon_split_qkv) return direction_of_one(matrix, config);
  const int64_t rows = matrix.size(0), columns = matrix.size(1);
  const int64_t block =
      std::accumulate(rows_of_matrices.begin(), rows_of_matrices.end(), int64_t{});
  require<UsageError>(rows % block == 0,
                      "muon_direction: found {} rows, allowed: a multiple of the {} of a block",
                      rows, block);
  std::vector<at::Tensor> parts =
      matrix.reshape({rows / block, block, columns}).split_with_sizes(rows_of_matrices, 1);
  for (at::Tensor& part : parts)
    part = direction_of_one(part.reshape({-1, columns}), config).reshape(part.sizes());
  return at::cat(parts, 1).view({rows, columns});
}

double muon_scale(int64_t rows, int64_t columns, MuonScaleMode mode) {
  const auto r = static_cast<double>(rows), c = static_cast<double>(columns);
  switch (mode) {
    case MuonScaleMode::spectral:
      return std::sqrt(std::max(r, c));
    case MuonScaleMode::unit_rms_norm:
      return std::sqrt(r / c);
    case MuonScaleMode::shape_scaling:
      return std::sqrt(std::max(1.0, r / c));
  }
  fail<UsageError>("unknown scale mode {}", static_cast<int>(mode));
}

}  // namespace lockstep
