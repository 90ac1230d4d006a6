#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "lockstep/training/axis.h"
#include "lockstep/training/curve.h"

namespace lockstep {
namespace {

constexpr double kGap = std::numeric_limits<double>::quiet_NaN();

std::vector<std::string> labels_of(const std::vector<Axis::Tick>& ticks) {
  std::vector<std::string> labels;
  for (const Axis::Tick& tick : ticks) labels.push_back(tick.label);
  return labels;
}

using Labels = std::vector<std::string>;

TEST(Axis, MarksAreAtOneTwoAndFive) {
  EXPECT_EQ(labels_of(Axis(0, 10).ticks(5)), (Labels{"0", "2", "4", "6", "8", "10"}));
  EXPECT_EQ(labels_of(Axis(2.13, 5.61).ticks(7)),
            (Labels{"2.5", "3.0", "3.5", "4.0", "4.5", "5.0", "5.5"}));
  EXPECT_EQ(labels_of(Axis(0, 600'000).ticks(4)), (Labels{"0", "200k", "400k", "600k"}));
  EXPECT_EQ(labels_of(Axis(-0.03, 0.03).ticks(3)), (Labels{"-0.02", "0", "0.02"}));
  EXPECT_EQ(labels_of(Axis(1, 3e9).ticks(3)), (Labels{"0", "1G", "2G", "3G"}));
}

TEST(Axis, ALongLogScaleHasPowersOfTenAndAShortOneEvenMarks) {
  EXPECT_EQ(labels_of(Axis(0.001, 100, true).ticks(7)),
            (Labels{"0.001", "0.01", "0.1", "1", "10", "100"}));
  EXPECT_EQ(labels_of(Axis(1, 100, true).ticks(7)),
            (Labels{"1", "2", "5", "10", "20", "50", "100"}));
  const auto close = Axis(2.1, 3.3, true).ticks(7);
  EXPECT_GE(close.size(), 3);
  EXPECT_EQ(Axis(1, 100, true).place(10), 0.5);
}

TEST(Axis, AnEmptyRangeIsMadeWider) {
  for (const double value : {0.0, 5.0, -3.0, 1e-9, 1e12}) {
    const Axis axis(value, value);
    EXPECT_NEAR(axis.place(value), 0.5, 1e-6) << value;
    EXPECT_GE(axis.ticks(5).size(), 2) << value;
    EXPECT_LE(axis.ticks(5).size(), 7) << value;
  }
  EXPECT_GT(Axis(5, 5, true).least(), 0);
}

TEST(Axis, RoundedEndsAtMarks) {
  const Axis axis = Axis(2.13, 5.61).rounded(7);
  EXPECT_NEAR(axis.least(), 2.0, 1e-12);
  EXPECT_NEAR(axis.greatest(), 6.0, 1e-12);
}

TEST(Curve, ThinningKeepsTheExtremesAndTheEnds) {
  std::vector<CurvePoint> curve;
  for (int i = 0; i < 100'000; ++i) curve.push_back({static_cast<double>(i), std::sin(i * 0.001)});
  curve[54'321].y = 17;
  curve[54'322].y = -23;
  curve[9].y = 5;
  const auto thin = thinned(curve, 2000);
  EXPECT_LE(thin.size(), 2000);
  EXPECT_GE(thin.size(), 1900);
  EXPECT_EQ(thin.front(), curve.front());
  EXPECT_EQ(thin.back(), curve.back());
  for (const double extreme : {17.0, -23.0, 5.0})
    EXPECT_TRUE(std::any_of(thin.begin(), thin.end(), [&](auto& p) { return p.y == extreme; }));
  EXPECT_TRUE(std::is_sorted(thin.begin(), thin.end(), [](auto& a, auto& b) { return a.x < b.x; }));
}

TEST(Curve, ThinningKeepsGapsAndLeavesShortCurvesAlone) {
  std::vector<CurvePoint> curve(10'000, {1, 2});
  curve[5000].y = kGap;
  const auto thin = thinned(curve, 100);
  EXPECT_EQ(std::count_if(thin.begin(), thin.end(), [](auto& p) { return std::isnan(p.y); }), 1);
  EXPECT_EQ(thinned({}, 100).size(), 0);
  const std::vector<CurvePoint> two = {{0, 1}, {1, 0}};
  EXPECT_EQ(thinned(two, 2), two);
}

TEST(Curve, SmoothingIsAMeanOfNeighboursOnBothSides) {
  const std::vector<CurvePoint> curve = {{0, 1}, {1, 5}, {2, 0}, {3, 4}, {4, kGap}, {5, 7}};
  const auto smooth = smoothed(curve, 2);
  EXPECT_EQ(smooth[0].y, 1);
  EXPECT_EQ(smooth[1].y, 2);
  EXPECT_EQ(smooth[2].y, 2.5);  // of 1, 5, 0, 4
  EXPECT_EQ(smooth[3].y, 4);    // of 5, 0, 4 and 7
  EXPECT_TRUE(std::isnan(smooth[4].y));
  EXPECT_EQ(smooth[5].y, 5.5);  // of 4 and 7
  EXPECT_TRUE(smoothed({}, 3).empty());
}

}  // namespace
}  // namespace lockstep
