#include "lockstep/training/line_chart.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/core/xml_text.h"
#include "lockstep/training/axis.h"
#include "lockstep/training/quantity_text.h"

namespace lockstep {
namespace {

constexpr double kWidth = 960, kPlotHeight = 430, kLeft = 76, kRight = 24, kBottom = 56;
constexpr double kTitle = 30, kLegendRow = 20, kLetter = 7.2;
constexpr size_t kPoints = 2000, kSmoothedFrom = 50, kDots = 60, kShownName = 60;
constexpr int kXTicks = 8, kYTicks = 7;

/// Legible on white and on black.
constexpr std::array<const char*, 8> kLineColours = {"#2f7ed8", "#e8710a", "#2a9d57", "#d64545",
                                                     "#9b59d0", "#0f9aa8", "#b8860b", "#d6529c"};

constexpr const char* kStyle = R"(<style>
text { fill: #24292f; }
.page { fill: #ffffff; }
.grid { stroke: #d8dee4; stroke-width: 1; }
.frame { stroke: #8c959f; stroke-width: 1; fill: none; }
.line { fill: none; stroke-linejoin: round; stroke-width: 2; }
.raw { stroke-width: 1; opacity: 0.35; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .page { fill: #0d1117; }
  .grid { stroke: #30363d; }
  .frame { stroke: #6e7681; }
  .raw { opacity: 0.45; }
}
</style>
)";

struct Bounds {
  double least = std::numeric_limits<double>::infinity();
  double greatest = -std::numeric_limits<double>::infinity();

  void add(double value) {
    least = std::min(least, value);
    greatest = std::max(greatest, value);
  }
  bool empty() const { return least > greatest; }
};

/// The end of a name that is long.
std::string shortened(const std::string& name) {
  if (utf8_length(name) <= kShownName) return name;
  size_t begin = name.size(), kept = 0;
  while (kept < kShownName)
    if ((name[--begin] & 0xC0) != 0x80) ++kept;
  return "…" + name.substr(begin);
}

/// Points that cannot be drawn become gaps.
std::vector<CurvePoint> drawable(const std::vector<CurvePoint>& points, bool logarithmic) {
  std::vector<CurvePoint> result = points;
  for (CurvePoint& point : result)
    if (!std::isfinite(point.y) || (logarithmic && point.y <= 0))
      point.y = std::numeric_limits<double>::quiet_NaN();
  return result;
}

class ChartDrawing {
 public:
  ChartDrawing(std::ostream& out, const LineChart& chart) : out_(out), chart_(chart) {
    for (const ChartLine& line : chart.lines) {
      points_.push_back(drawable(line.points, chart.logarithmic));
      for (const CurvePoint& point : points_.back()) {
        if (std::isnan(point.y)) continue;
        x_bounds_.add(point.x);
        y_bounds_.add(point.y);
      }
    }
    require<ConfigError>(!y_bounds_.empty(), "{}: nothing to draw: found no {} number",
                         chart.y_label, chart.logarithmic ? "positive" : "finite");
    for (const ChartLine& line : chart.lines)
      if (std::find(names_.begin(), names_.end(), line.name) == names_.end())
        names_.push_back(line.name);
    place_legend();
  }

  void draw() {
    write(R"(<svg xmlns="http://www.w3.org/2000/svg" width="{0:.0f}" height="{1:.0f}" )"
          R"(viewBox="0 0 {0:.0f} {1:.0f}" font-family="sans-serif" font-size="13">)",
          kWidth, bottom_ + kBottom);
    write("\n{}<rect class=\"page\" width=\"100%\" height=\"100%\"/>\n", kStyle);
    write("<text x=\"{:.0f}\" y=\"22\" font-size=\"15\">{}</text>\n", kLeft,
          xml_text(chart_.title));
    draw_legend();
    const Axis x(x_bounds_.least, x_bounds_.greatest);
    const Axis exact(y_bounds_.least, y_bounds_.greatest, chart_.logarithmic);
    const Axis y = exact.rounded(3 * kYTicks);
    draw_axes(x, y);
    for (size_t i = 0; i < points_.size(); ++i) draw_line(chart_.lines[i], points_[i], x, y);
    write("</svg>\n");
  }

 private:
  template <class... Args>
  void write(fmt::format_string<Args...> text, Args&&... args) {
    fmt::format_to(std::ostreambuf_iterator<char>(out_), text, std::forward<Args>(args)...);
  }

  const char* colour_of(const std::string& name) const {
    const auto number = std::find(names_.begin(), names_.end(), name) - names_.begin();
    return kLineColours[static_cast<size_t>(number) % kLineColours.size()];
  }

  void place_legend() {
    double x = kLeft, y = kTitle + 12;
    for (const std::string& name : names_) {
      const double width = 34 + kLetter * static_cast<double>(utf8_length(shortened(name)));
      if (x > kLeft && x + width > kWidth - kRight) {
        x = kLeft;
        y += kLegendRow;
      }
      legend_.push_back({x, y});
      x += width;
    }
    top_ = y + 14;
    bottom_ = top_ + kPlotHeight;
  }

  void draw_legend() {
    for (size_t i = 0; i < names_.size(); ++i) {
      const auto& [x, y] = legend_[i];
      write("<rect x=\"{:.0f}\" y=\"{:.0f}\" width=\"12\" height=\"12\" rx=\"2\" fill=\"{}\"/>", x,
            y - 11, colour_of(names_[i]));
      write("<text class=\"legend\" x=\"{:.0f}\" y=\"{:.0f}\">{}<title>{}</title></text>\n", x + 18,
            y, xml_text(shortened(names_[i])), xml_text(names_[i]));
    }
  }

  double across(const Axis& axis, double value) const {
    return kLeft + axis.place(value) * (kWidth - kLeft - kRight);
  }
  double down(const Axis& axis, double value) const {
    return bottom_ - axis.place(value) * kPlotHeight;
  }

  void draw_axes(const Axis& x, const Axis& y) {
    for (const Axis::Tick& tick : y.ticks(kYTicks)) {
      const double at = down(y, tick.value);
      write("<line class=\"grid\" x1=\"{:.0f}\" y1=\"{:.1f}\" x2=\"{:.0f}\" y2=\"{:.1f}\"/>", kLeft,
            at, kWidth - kRight, at);
      write("<text class=\"y-tick\" x=\"{:.0f}\" y=\"{:.1f}\" text-anchor=\"end\">{}</text>\n",
            kLeft - 8, at + 4.5, tick.label);
    }
    for (const Axis::Tick& tick : x.ticks(kXTicks)) {
      const double at = across(x, tick.value);
      write("<line class=\"grid\" x1=\"{:.1f}\" y1=\"{:.0f}\" x2=\"{:.1f}\" y2=\"{:.0f}\"/>", at,
            top_, at, bottom_);
      write("<text class=\"x-tick\" x=\"{:.1f}\" y=\"{:.0f}\" text-anchor=\"middle\">{}</text>\n",
            at, bottom_ + 18, tick.label);
    }
    write("<rect class=\"frame\" x=\"{:.0f}\" y=\"{:.0f}\" width=\"{:.0f}\" height=\"{:.0f}\"/>\n",
          kLeft, top_, kWidth - kLeft - kRight, kPlotHeight);
    write("<text x=\"{:.0f}\" y=\"{:.0f}\" text-anchor=\"middle\">{}</text>\n",
          (kLeft + kWidth - kRight) / 2, bottom_ + kBottom - 14, xml_text(chart_.x_label));
    write("<text transform=\"translate(18 {:.0f}) rotate(-90)\" text-anchor=\"middle\">{}</text>\n",
          (top_ + bottom_) / 2, xml_text(chart_.y_label));
  }

  void draw_line(const ChartLine& line, const std::vector<CurvePoint>& points, const Axis& x,
                 const Axis& y) {
    const char* const colour = colour_of(line.name);
    if (line.dashed) {
      draw_path(thinned(points, kPoints), x, y, "line", colour, " stroke-dasharray=\"6 4\"");
      if (points.size() <= kDots) draw_dots(points, x, y, colour);
      return;
    }
    const bool many = points.size() >= kSmoothedFrom;
    draw_path(thinned(points, kPoints), x, y, many ? "line raw" : "line", colour, "");
    if (many)
      draw_path(thinned(course_of(points), kPoints), x, y, "line smooth", colour, "");
    else if (points.size() == 1)
      draw_dots(points, x, y, colour);
  }

  /// The points, smoothed as they are drawn: on a log scale by their logarithms.
  std::vector<CurvePoint> course_of(std::vector<CurvePoint> points) const {
    const size_t reach = points.size() / 50;
    if (!chart_.logarithmic) return smoothed(points, reach);
    for (CurvePoint& point : points) point.y = std::log(point.y);
    points = smoothed(points, reach);
    for (CurvePoint& point : points) point.y = std::exp(point.y);
    return points;
  }

  void draw_path(const std::vector<CurvePoint>& points, const Axis& x, const Axis& y,
                 const char* kind, const char* colour, const char* dashes) {
    write("<path class=\"{}\" stroke=\"{}\"{} d=\"", kind, colour, dashes);
    const char* step = "M";
    for (const CurvePoint& point : points) {
      if (std::isnan(point.y)) {
        step = "M";
        continue;
      }
      write("{}{:.1f} {:.1f}", step, across(x, point.x), down(y, point.y));
      step = "L";
    }
    write("\"/>\n");
  }

  void draw_dots(const std::vector<CurvePoint>& points, const Axis& x, const Axis& y,
                 const char* colour) {
    for (const CurvePoint& point : points)
      if (!std::isnan(point.y))
        write("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>\n", across(x, point.x),
              down(y, point.y), colour);
  }

  std::ostream& out_;
  const LineChart& chart_;
  std::vector<std::vector<CurvePoint>> points_;
  std::vector<std::string> names_;
  Bounds x_bounds_, y_bounds_;
  std::vector<std::pair<double, double>> legend_;  ///< where its entries are
  double top_ = 0, bottom_ = 0;
};

}  // namespace

void write_line_chart_svg(std::ostream& out, const LineChart& chart) {
  ChartDrawing(out, chart).draw();
}

}  // namespace lockstep
