#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/training/metrics_reader.h"
#include "lockstep/training/terminal_chart.h"

namespace lockstep {

/// What stands beside the metrics of a run.
struct RunFacts {
  std::string name;
  /// Of its config.textproto; unset where that is not there.
  std::optional<int64_t> train_iters = {};
  std::string layout = {};        ///< layout_text(); empty where it is not known
  double seconds_since_line = 0;  ///< since something was written
  bool ended = false;
};

/// The fields that run_view() draws: for MetricsReader.
std::vector<std::string> fields_of_run_view();

/// A run as lines for a terminal, of `size` at most: how far it is, the curve of the loss, rates,
/// what an iteration spends its time on, memory, the slowest rank. What the metrics lack is left
/// out; what does not fit is cut, the curve first.
std::vector<std::string> run_view(const RunFacts& facts, const RunMetrics& metrics,
                                  const TerminalSize& size);

}  // namespace lockstep
