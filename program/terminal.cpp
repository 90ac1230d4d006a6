#include "lockstep/program/terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <iostream>
#include <string_view>

namespace lockstep {
namespace {

constexpr const char *kSecondScreen = "\x1b[?1049h\x1b[?25l",
                     *kFirstScreen = "\x1b[?25h\x1b[?1049l";
constexpr const char *kHome = "\x1b[H", *kClearToEndOfLine = "\x1b[K", *kClearBelow = "\x1b[J";

std::string_view environment(const char* name) {
  const char* const value = std::getenv(name);
  return value ? value : "";
}

bool locale_is_utf8() {
  for (const char* name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    std::string value(environment(name));
    if (value.empty()) continue;
    std::transform(value.begin(), value.end(), value.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    return value.find("utf-8") != value.npos || value.find("utf8") != value.npos;
  }
  return false;
}

}  // namespace

bool terminal_can_redraw(int descriptor) {
  const std::string_view kind = environment("TERM");
  return ::isatty(descriptor) == 1 && !kind.empty() && kind != "dumb";
}

TerminalSize terminal_size(int descriptor) {
  TerminalSize size;
  size.utf8 = locale_is_utf8();
  winsize window = {};
  if (::ioctl(descriptor, TIOCGWINSZ, &window) != 0) return size;
  if (window.ws_col > 0) size.columns = window.ws_col;
  if (window.ws_row > 0) size.rows = window.ws_row;
  return size;
}

TerminalPicture::TerminalPicture() { std::cout << kSecondScreen << std::flush; }

TerminalPicture::~TerminalPicture() { std::cout << kFirstScreen << std::flush; }

void TerminalPicture::show(const std::vector<std::string>& lines) {
  std::cout << kHome;
  for (size_t i = 0; i < lines.size(); ++i)
    std::cout << (i == 0 ? "" : "\n") << lines[i] << kClearToEndOfLine;
  std::cout << kClearBelow << std::flush;
}

void print_lines(const std::vector<std::string>& lines) {
  for (const std::string& line : lines) std::cout << line << "\n";
}

}  // namespace lockstep
