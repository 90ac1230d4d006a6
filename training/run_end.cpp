#include "lockstep/training/run_end.h"

#include <cmath>

namespace lockstep {
namespace {

constexpr RunEnd kLastWish = RunEnd::launcher_lost;

/// The number of ranks that want an end has a digit of its own, in base ranks + 1.
double digit(RunEnd end, int64_t ranks) {
  return std::pow(static_cast<double>(ranks + 1), static_cast<int>(end) - 1);
}

}  // namespace

bool is_stop(RunEnd end) { return end > RunEnd::none && end <= kLastWish; }

std::string_view name_of(RunEnd end) {
  switch (end) {
    case RunEnd::none:
      return "nothing";
    case RunEnd::sigint:
      return "SIGINT";
    case RunEnd::sigterm:
      return "SIGTERM";
    case RunEnd::launcher_lost:
      return "launcher lost";
    case RunEnd::diverged:
      return "divergence";
    case RunEnd::done:
      return "end";
  }
  return "";
}

double encode_run_end(RunEnd wish, int64_t ranks) {
  return wish == RunEnd::none ? 0 : digit(wish, ranks);
}

RunEnd agreed_end(double sum, int64_t ranks) {
  for (int end = static_cast<int>(kLastWish); end > static_cast<int>(RunEnd::none); --end)
    if (sum >= digit(static_cast<RunEnd>(end), ranks)) return static_cast<RunEnd>(end);
  return RunEnd::none;
}

}  // namespace lockstep
