#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace lockstep {

/// Rows of bars, each made of parts side by side.
struct StackedBars {
  struct Row {
    std::string name;
    std::vector<int64_t> parts;  ///< 0 or more each
    std::string text = {};       ///< to the right of the bar
  };
  std::vector<std::string> legend;  ///< of each part
  bool has_legend = true;           ///< drawn, not only shown on hovering
  std::vector<Row> rows;
};

/// Draws an SVG element: a row for each of `bars.rows`, all to the same scale. Hovering over a part
/// shows its legend and value, followed by `unit`. Parts too thin to see are left out.
void write_stacked_bars_svg(std::ostream& out, const StackedBars& bars, const std::string& unit);

}  // namespace lockstep
