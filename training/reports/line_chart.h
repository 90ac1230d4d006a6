#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "lockstep/training/curve.h"

namespace lockstep {

/// One line of a chart.
struct ChartLine {
  std::string name;                ///< in the legend; lines of one name share a colour and an entry
  std::vector<CurvePoint> points;  ///< x grows; y may have gaps (NaN)
  bool dashed = false;  ///< and with a dot at each point: few points, such as validations
};

struct LineChart {
  std::string title, x_label, y_label;
  std::vector<ChartLine> lines;
  bool logarithmic = false;  ///< the y axis; points of y <= 0 are left out
};

/// Draws `chart` as an SVG document of 960 by 542, taller where the legend has several rows. It
/// follows the reader's light or dark colours. A line of many points is thinned to about 2,000,
/// which keep its extremes, and is drawn pale under its smoothed version. Names may hold any bytes.
/// ConfigError if no point is left to draw.
void write_line_chart_svg(std::ostream& out, const LineChart& chart);

}  // namespace lockstep
