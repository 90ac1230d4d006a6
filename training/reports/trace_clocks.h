#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// When collectives ended on one rank, according to its clock.
struct TraceClock {
  std::string host;  ///< ranks of one host read the same clock
  /// The end times by name, which gives operation, label and group; in microseconds, in order.
  std::map<std::string, std::vector<double>> ends;
};

/// How far each rank's clock is ahead of the first one's, in microseconds. A collective in which
/// every rank hears from every other ends everywhere at nearly the same time, so the offset between
/// two hosts is the median over the collectives that involved ranks of both. Empty for a rank whose
/// host has no collective with the others: its clock is left as it is.
std::vector<std::optional<double>> clock_offsets(const std::vector<TraceClock>& clocks);

/// Whether a name in a trace is that of a collective that ends everywhere at nearly the same time.
bool ends_everywhere_at_once(const std::string& name);

}  // namespace lockstep
