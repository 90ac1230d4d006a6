#pragma once

#include <string>
#include <vector>

#include "lockstep/training/terminal_chart.h"

namespace lockstep {

/// Whether standard output is a terminal that pictures can be drawn over again on.
bool terminal_can_redraw();

/// Of the terminal on standard output: its size, 80 by 24 where that is not known, and whether the
/// locale (LC_ALL, LC_CTYPE, LANG) is UTF-8.
TerminalSize terminal_size();

/// A picture on standard output that is drawn over again, on the terminal's second screen. The end
/// of its life shows the first screen as it was.
class TerminalPicture {
 public:
  TerminalPicture();
  ~TerminalPicture();
  TerminalPicture(const TerminalPicture&) = delete;
  TerminalPicture& operator=(const TerminalPicture&) = delete;

  void show(const std::vector<std::string>& lines);
};

/// Each in a line of standard output.
void print_lines(const std::vector<std::string>& lines);

}  // namespace lockstep
