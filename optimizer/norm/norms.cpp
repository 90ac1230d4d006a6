#include "lockstep/optimizer/norms.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>

#include "lockstep/optimizer/counted_grads.h"

namespace lockstep {
namespace {

constexpr const char *kNorm = "gradient norm", *kLargest = "largest gradient";
constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor zero(c10::Device device) {
  return at::zeros({}, at::TensorOptions(device).dtype(at::kDouble));
}

template <class OfPiece>
std::vector<at::Tensor> sums(const PieceClasses& classes, c10::Device device, OfPiece of_piece) {
  std::vector<at::Tensor> result;
  for (const auto& pieces : classes) {
    at::Tensor total;
    for (const at::Tensor& piece : pieces)
      total = total.defined() ? total.add_(of_piece(piece)) : of_piece(piece);
    result.push_back(total.defined() ? total : zero(device));
  }
  return result;
}

/// In fp64, or complex fp64.
at::Tensor widened(const at::Tensor& piece) {
  return piece.to(piece.is_complex() ? at::kComplexDouble : at::kDouble);
}

/// The largest absolute value.
at::Tensor largest(const std::vector<at::Tensor>& pieces, c10::Device device) {
  at::Tensor most = zero(device);
  for (const at::Tensor& piece : pieces)
    if (piece.numel() > 0)
      most = at::maximum(
          most, at::linalg_vector_norm(piece.is_complex() ? widened(piece) : piece, kInfinity)
                    .to(at::kDouble));
  return at::nan_to_num(most, kInfinity, kInfinity);
}

std::vector<at::Tensor> largest_of_each(const PieceClasses& classes, c10::Device device) {
  std::vector<at::Tensor> of_class;
  for (const auto& pieces : classes) of_class.push_back(largest(pieces, device));
  return of_class;
}

/// The divisor of the elements before they are raised to a power.
at::Tensor unit_of(const at::Tensor& most) {
  return at::where(most.gt(0).logical_and(most.isfinite()), most, 1.0);
}

at::Tensor sum_of_powers(const at::Tensor& piece, double p, const at::Tensor& unit) {
  at::Tensor total = at::zeros_like(unit);
  for (const at::Tensor& part : cache_sized_parts(piece))
    total += widened(part).abs().div_(unit).pow_(p).sum();
  return total;
}

at::Tensor infinity_norm(const PieceClasses& classes, c10::Device device,
                         const CombineClasses& combine) {
  return combine(largest_of_each(classes, device), ReduceOp::max, kLargest);
}

at::Tensor power_norm(const PieceClasses& classes, double p, const at::Tensor& unit,
                      const CombineClasses& combine) {
  const auto powers = [&](const at::Tensor& piece) { return sum_of_powers(piece, p, unit); };
  return unit * combine(sums(classes, unit.device(), powers), ReduceOp::sum, kNorm).pow(1 / p);
}

}  // namespace

at::Tensor norm_of_pieces(const PieceClasses& classes, double p, c10::Device device,
                          const CombineClasses& combine) {
  if (std::isinf(p)) return infinity_norm(classes, device, combine);
  if (p == 2) return combine(sums(classes, device, sum_of_squares), ReduceOp::sum, kNorm).sqrt();
  return power_norm(classes, p, unit_of(infinity_norm(classes, device, combine)), combine);
}

at::Tensor scaled_norm_of_pieces(const PieceClasses& classes, double p, c10::Device device,
                                 const CombineClasses& combine) {
  const at::Tensor most = infinity_norm(classes, device, combine);
  if (!std::isfinite(most.item<double>())) return most;
  return power_norm(classes, p, unit_of(most), combine);
}

std::vector<at::Tensor> norms_of_classes(const PieceClasses& classes, double p, c10::Device device,
                                         const ReduceClasses& reduce) {
  std::vector<at::Tensor> units = largest_of_each(classes, device), totals;
  reduce(units, ReduceOp::max, kLargest);
  for (size_t i = 0; i < classes.size(); ++i) {
    units[i] = unit_of(units[i]);
    totals.push_back(zero(device));
    for (const at::Tensor& piece : classes[i]) totals[i] += sum_of_powers(piece, p, units[i]);
  }
  reduce(totals, ReduceOp::sum, kNorm);
  for (size_t i = 0; i < classes.size(); ++i) totals[i] = units[i] * totals[i].pow(1 / p);
  return totals;
}

}  // namespace lockstep
