#include "lockstep/training/terminal_chart.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "lockstep/training/axis.h"

namespace lockstep {
namespace {

constexpr int kLeastColumns = 16, kLeastRows = 3;

/// The grid of dots that the characters show.
class DotGrid {
 public:
  DotGrid(int columns, int rows, bool utf8)
      : columns_(columns),
        rows_(rows),
        utf8_(utf8),
        cells_(static_cast<size_t>(columns) * static_cast<size_t>(rows)) {}

  int width() const { return columns_ * (utf8_ ? 2 : 1); }
  int height() const { return rows_ * (utf8_ ? 4 : 1); }

  /// Sets the dots of one column from row `top` to `bottom`.
  void fill(int x, int top, int bottom) {
    for (int y = std::max(top, 0); y <= std::min(bottom, height() - 1); ++y) set(x, y);
  }

  std::string row(int row) const {
    std::string text;
    for (int column = 0; column < columns_; ++column) {
      const unsigned dots = cell(column, row);
      if (dots == 0)
        text += ' ';
      else if (!utf8_)
        text += '*';
      else  // U+2800 + dots
        text +=
            {'\xE2', static_cast<char>(0xA0 | dots >> 6), static_cast<char>(0x80 | (dots & 0x3F))};
    }
    return text;
  }

 private:
  void set(int x, int y) {
    static constexpr unsigned kDots[4][2] = {
        {0x01, 0x08}, {0x02, 0x10}, {0x04, 0x20}, {0x40, 0x80}};
    if (utf8_)
      cell(x / 2, y / 4) |= kDots[y % 4][x % 2];
    else
      cell(x, y) = 1;
  }
  unsigned& cell(int column, int row) {
    return cells_[static_cast<size_t>(row) * static_cast<size_t>(columns_) +
                  static_cast<size_t>(column)];
  }
  unsigned cell(int column, int row) const {
    return cells_[static_cast<size_t>(row) * static_cast<size_t>(columns_) +
                  static_cast<size_t>(column)];
  }

  int columns_, rows_;
  bool utf8_;
  std::vector<unsigned> cells_;
};

struct Extent {
  double least = std::numeric_limits<double>::infinity();
  double greatest = -std::numeric_limits<double>::infinity();
};

Extent extent_of(const std::vector<CurvePoint>& curve, double CurvePoint::*coordinate) {
  Extent extent;
  for (const CurvePoint& point : curve) {
    if (!std::isfinite(point.y)) continue;
    extent.least = std::min(extent.least, point.*coordinate);
    extent.greatest = std::max(extent.greatest, point.*coordinate);
  }
  return extent;
}

/// A dot of a grid.
struct DotPlace {
  int column, row;
};

/// Fills the columns after `from` up to `to`, each from the row of the previous column to its own.
void connect(DotGrid& grid, const DotPlace& from, const DotPlace& to) {
  const int columns = std::max(to.column - from.column, 1);
  int last = from.row;
  for (int step = 1; step <= columns; ++step) {
    const int row = from.row + (to.row - from.row) * step / columns;
    grid.fill(std::min(from.column + step, to.column), std::min(last, row), std::max(last, row));
    last = row;
  }
}

void draw_curve(DotGrid& grid, const std::vector<CurvePoint>& curve, const Axis& x, const Axis& y) {
  DotPlace last = {0, 0};
  bool connected = false;
  for (const CurvePoint& point : curve) {
    if (!std::isfinite(point.y)) {
      connected = false;
      continue;
    }
    const double down = std::clamp(1 - y.place(point.y), 0.0, 1.0);
    const DotPlace place = {static_cast<int>(std::lround(x.place(point.x) * (grid.width() - 1))),
                            static_cast<int>(std::lround(down * (grid.height() - 1)))};
    connect(grid, connected ? last : place, place);
    last = place;
    connected = true;
  }
}

}  // namespace

std::vector<std::string> terminal_curve(const std::vector<CurvePoint>& curve, int columns, int rows,
                                        bool utf8) {
  const Extent in_x = extent_of(curve, &CurvePoint::x), in_y = extent_of(curve, &CurvePoint::y);
  if (columns < kLeastColumns || rows < kLeastRows || in_x.least > in_x.greatest) return {};
  const Axis x(in_x.least, in_x.greatest);
  const Axis y = Axis(in_y.least, in_y.greatest).rounded(rows);
  const auto ticks = y.ticks(std::max(1, rows / 3));
  size_t margin = 0;
  for (const Axis::Tick& tick : ticks) margin = std::max(margin, tick.label.size());
  DotGrid grid(columns - static_cast<int>(margin) - 2, rows, utf8);
  draw_curve(grid, curve, x, y);
  std::vector<std::string> labels(static_cast<size_t>(rows));
  for (const Axis::Tick& tick : ticks)
    labels[static_cast<size_t>(std::lround((1 - y.place(tick.value)) * (rows - 1)))] = tick.label;
  std::vector<std::string> lines;
  for (int row = 0; row < rows; ++row) {
    const std::string& label = labels[static_cast<size_t>(row)];
    std::string line = std::string(margin - label.size(), ' ') + label;
    line += utf8 ? (label.empty() ? " │" : " ┤") : (label.empty() ? " |" : " +");
    line += grid.row(row);
    line.erase(line.find_last_not_of(' ') + 1);
    lines.push_back(std::move(line));
  }
  return lines;
}

std::string terminal_shares(const std::vector<std::pair<char, double>>& shares, int columns) {
  std::string row;
  double sum = 0;
  for (const auto& [letter, share] : shares) {
    sum += std::max(share, 0.0);
    const auto end = static_cast<size_t>(std::lround(std::min(sum, 1.0) * columns));
    if (end > row.size()) row.append(end - row.size(), letter);
  }
  row.append(static_cast<size_t>(columns) - row.size(), '.');
  return row;
}

std::string terminal_line(std::string_view text, int columns, bool utf8) {
  std::string line;
  for (int count = 0; !text.empty() && count < columns;) {
    const auto first = static_cast<unsigned char>(text[0]);
    size_t length = 1;
    while (length < text.size() && (text[length] & 0xC0) == 0x80) ++length;
    const std::string_view character = text.substr(0, length);
    text.remove_prefix(length);
    if (first < ' ' || first == 0x7F) continue;
    const size_t expected = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : first >= 0xC0 ? 2 : 1;
    const bool ascii = first < 0x80 && length == 1;
    const bool whole = utf8 && first >= 0xC0 && length == expected;
    line += ascii || whole ? character : "?";
    ++count;
  }
  return line;
}

}  // namespace lockstep
