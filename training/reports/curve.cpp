#include "lockstep/training/curve.h"

#include <algorithm>
#include <cmath>

namespace lockstep {
namespace {

/// Adds the least and the greatest point of curve[begin, end), and the first gap, in their order.
void add_extremes(const std::vector<CurvePoint>& curve, size_t begin, size_t end,
                  std::vector<CurvePoint>& kept) {
  std::vector<size_t> chosen;
  size_t least = end, greatest = end, gap = end;
  for (size_t i = begin; i < end; ++i) {
    const double y = curve[i].y;
    if (std::isnan(y)) {
      if (gap == end) gap = i;
      continue;
    }
    if (least == end || y < curve[least].y) least = i;
    if (greatest == end || y > curve[greatest].y) greatest = i;
  }
  for (const size_t i : {least, greatest, gap})
    if (i != end) chosen.push_back(i);
  std::sort(chosen.begin(), chosen.end());
  chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  for (const size_t i : chosen) kept.push_back(curve[i]);
}

}  // namespace

std::vector<CurvePoint> thinned(const std::vector<CurvePoint>& curve, size_t limit) {
  if (curve.size() <= limit) return curve;
  std::vector<CurvePoint> kept = {curve.front()};
  const size_t inner = curve.size() - 2, stretches = std::max<size_t>((limit - 2) / 2, 1);
  for (size_t s = 0; s < stretches; ++s)
    add_extremes(curve, 1 + inner * s / stretches, 1 + inner * (s + 1) / stretches, kept);
  kept.push_back(curve.back());
  return kept;
}

std::vector<CurvePoint> smoothed(const std::vector<CurvePoint>& curve, size_t reach) {
  std::vector<double> sums = {0};
  std::vector<double> counts = {0};
  for (const CurvePoint& point : curve) {
    const bool counted = std::isfinite(point.y);
    sums.push_back(sums.back() + (counted ? point.y : 0));
    counts.push_back(counts.back() + (counted ? 1 : 0));
  }
  std::vector<CurvePoint> result = curve;
  for (size_t i = 0; i < curve.size(); ++i) {
    if (!std::isfinite(curve[i].y)) continue;
    const size_t wide = std::min(reach, i);
    const size_t begin = i - wide, end = std::min(i + wide + 1, curve.size());
    result[i].y = (sums[end] - sums[begin]) / (counts[end] - counts[begin]);
  }
  return result;
}

}  // namespace lockstep
