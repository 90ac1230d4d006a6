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

/// The mean of each point with as many neighbours on both sides, `reach` at most: near the ends
/// fewer, so that no point is drawn towards one side. Gaps count nothing and stay.
std::vector<CurvePoint> smoothed(const std::vector<CurvePoint>& curve, size_t reach);

}  // namespace lockstep
