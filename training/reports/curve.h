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

/// At most about `limit` points (4 or more) that look the same: of each stretch of the curve the
/// least and the greatest are kept, of each gap one. The first and the last point stay.
std::vector<CurvePoint> thinned(const std::vector<CurvePoint>& curve, size_t limit);

/// The mean of each point with `reach` neighbours on both sides: near the beginning fewer on both,
/// where curves are steep, and near the end those that there are. Gaps count nothing and stay.
std::vector<CurvePoint> smoothed(const std::vector<CurvePoint>& curve, size_t reach);

}  // namespace lockstep
