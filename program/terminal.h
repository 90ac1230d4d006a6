#pragma once

#include <unistd.h>

#include <string>
#include <vector>

#include "lockstep/training/terminal_chart.h"

namespace lockstep {

/// Whether `descriptor` is a terminal on which pictures and lines can be redrawn.
bool terminal_can_redraw(int descriptor = STDOUT_FILENO);

/// The size of the terminal at `descriptor`, 80 by 24 if it is not known, and whether the locale
/// (LC_ALL, LC_CTYPE, LANG) is UTF-8.
TerminalSize terminal_size(int descriptor = STDOUT_FILENO);

/// A picture on standard output that is redrawn, on the terminal's alternate screen. The destructor
/// restores the main screen.
class TerminalPicture {
 public:
  TerminalPicture();
  ~TerminalPicture();
  TerminalPicture(const TerminalPicture&) = delete;
  TerminalPicture& operator=(const TerminalPicture&) = delete;

  void show(const std::vector<std::string>& lines);
};

/// Prints each as a line to standard output.
void print_lines(const std::vector<std::string>& lines);

}  // namespace lockstep
