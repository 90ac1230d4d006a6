#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/training/curve.h"

/// Pictures made of characters. Needs no libtorch.
namespace lockstep {

/// The size of a terminal, and whether it can show UTF-8.
struct TerminalSize {
  int columns = 80;
  int rows = 24;
  bool utf8 = false;  ///< otherwise only ASCII is drawn
};

/// A curve in `columns` by `rows` characters, including the tick marks of the y axis: braille dots,
/// 2 by 4 in a character, or asterisks. Rows have at most `columns` characters and no trailing
/// spaces. If the space is too small, or the curve has no finite point, there are no rows.
std::vector<std::string> terminal_curve(const std::vector<CurvePoint>& curve, int columns, int rows,
                                        bool utf8);

/// A row of `columns` characters that shows shares of a whole: "FFFFBBBBBBBC". Each part has its
/// letter; parts above half a character get one or more. Shares need not add up to 1; the remainder
/// is '.'.
std::string terminal_shares(const std::vector<std::pair<char, double>>& shares, int columns);

/// The first `columns` characters of a line in UTF-8; with `utf8` off, characters outside ASCII
/// become '?'. Control characters are left out.
std::string terminal_line(std::string_view text, int columns, bool utf8);

}  // namespace lockstep
