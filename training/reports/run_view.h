#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/training/metrics_reader.h"
#include "lockstep/training/terminal_chart.h"

namespace lockstep {

/// The facts that are shown besides the metrics of a run.
struct RunFacts {
  std::string name;
  /// From its config.textproto; unset if that does not exist.
  std::optional<int64_t> train_iters = {};
  std::string layout = {};        ///< layout_text(); empty if it is not known
  double seconds_since_line = 0;  ///< since something was written
  bool ended = false;
};

/// The fields that run_view() draws: for MetricsReader.
std::vector<std::string> fields_of_run_view();

/// A run as lines for a terminal, of `size` at most: its progress, the loss curve, rates, what an
/// iteration spends its time on, memory, the slowest rank. What the metrics lack is left out; what
/// does not fit is cut, the curve first.
std::vector<std::string> run_view(const RunFacts& facts, const RunMetrics& metrics,
                                  const TerminalSize& size);

}  // namespace lockstep
