#include "lockstep/planner/stacked_bars.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <numeric>
#include <ostream>

#include "lockstep/core/check.h"
#include "lockstep/core/xml_text.h"

namespace lockstep {
namespace {

constexpr double kRow = 26, kGap = 4, kLeft = 150, kWidth = 640, kRight = 190, kLegend = 30;
constexpr double kLegendEntry = 130;
constexpr std::array<const char*, 6> kColours = {"#2b6cb0", "#9ecaf3", "#248046",
                                                 "#a4dba8", "#c97f12", "#fad691"};

class Bars {
 public:
  Bars(std::ostream& out, const StackedBars& bars, const std::string& unit)
      : out_(out), bars_(bars), unit_(unit) {
    int64_t most = 1;
    for (const StackedBars::Row& row : bars.rows)
      most = std::max(most, std::reduce(row.parts.begin(), row.parts.end()));
    scale_ = kWidth / static_cast<double>(most);
  }

  void draw() {
    const double top = bars_.has_legend ? kLegend : 0;
    write(R"(<svg xmlns="http://www.w3.org/2000/svg" width="{0:.0f}" height="{1:.0f}" )"
          R"(viewBox="0 0 {0:.0f} {1:.0f}" font-family="sans-serif" font-size="12">)",
          kLeft + kWidth + kRight, top + kRow * static_cast<double>(bars_.rows.size()));
    write("\n");
    if (bars_.has_legend) draw_legend();
    for (size_t i = 0; i < bars_.rows.size(); ++i)
      draw_row(bars_.rows[i], top + kRow * static_cast<double>(i));
    write("</svg>\n");
  }

 private:
  template <class... Args>
  void write(fmt::format_string<Args...> text, Args&&... args) {
    fmt::format_to(std::ostreambuf_iterator<char>(out_), text, std::forward<Args>(args)...);
  }

  void draw_legend() {
    for (size_t i = 0; i < bars_.legend.size(); ++i) {
      const double x = kLeft + kLegendEntry * static_cast<double>(i);
      write("<rect class=\"legend\" x=\"{:.0f}\" y=\"4\" width=\"14\" height=\"14\" fill=\"{}\"/>",
            x, kColours[i % kColours.size()]);
      write("<text x=\"{:.0f}\" y=\"16\">{}</text>\n", x + 20, xml_text(bars_.legend[i]));
    }
  }

  void draw_row(const StackedBars::Row& row, double y) {
    write("<text x=\"{:.0f}\" y=\"{:.0f}\" text-anchor=\"end\">{}</text>\n", kLeft - 10, y + 15,
          xml_text(row.name));
    int64_t before = 0;
    for (size_t i = 0; i < row.parts.size(); ++i) {
      if (row.parts[i] > 0) draw_part(i, before, row.parts[i], y);
      before += row.parts[i];
    }
    write("<text x=\"{:.2f}\" y=\"{:.0f}\">{}</text>\n", edge(before) + 8, y + 15,
          xml_text(row.text));
  }

  void draw_part(size_t index, int64_t before, int64_t value, double y) {
    const double x = edge(before), width = edge(before + value) - x;
    if (width < 0.005) return;
    write(
        "<rect class=\"part\" x=\"{:.2f}\" y=\"{:.0f}\" width=\"{:.2f}\" height=\"{:.0f}\" "
        "fill=\"{}\"><title>{}: {} {}</title></rect>\n",
        x, y, width, kRow - kGap, kColours[index % kColours.size()], xml_text(bars_.legend[index]),
        value, unit_);
  }

  /// An edge in the bar, rounded to hundredths, so that parts meet.
  double edge(int64_t value) const {
    return std::round(100 * (kLeft + static_cast<double>(value) * scale_)) / 100;
  }

  std::ostream& out_;
  const StackedBars& bars_;
  const std::string& unit_;
  double scale_;
};

}  // namespace

void write_stacked_bars_svg(std::ostream& out, const StackedBars& bars, const std::string& unit) {
  for (const StackedBars::Row& row : bars.rows)
    require<UsageError>(row.parts.size() <= bars.legend.size(),
                        "stacked bars: row '{}' has {} parts, the legend {}", row.name,
                        row.parts.size(), bars.legend.size());
  Bars(out, bars, unit).draw();
}

}  // namespace lockstep
