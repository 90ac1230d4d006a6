#pragma once

#include <cstddef>
#include <vector>

/// Long curves made short for a picture. Needs no libtorch.
namespace lockstep {

/// A NaN in y is a gap.
struct CurvePoint {
  double x = 0;
  double y = 0;

  bool operator==(const CurvePoint&) const = default;
};

/// At most about `limit` points (4 or more) that look the same: the least and the greatest point of
/// each stretch of the curve are kept, and one point of each gap. The first and the last point
/// stay.
std::vector<CurvePoint> thinned(const std::vector<CurvePoint>& curve, size_t limit);

/// The mean of each point and `reach` neighbours on both sides: near the beginning, where curves
/// are steep, fewer on both sides, and near the end those that exist. Gaps do not count, and stay.
std::vector<CurvePoint> smoothed(const std::vector<CurvePoint>& curve, size_t reach);

}  // namespace lockstep
