#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// When collectives ended on one rank, by its clock.
struct TraceClock {
  std::string host;  ///< ranks of one host read the same clock
  /// By name, which tells operation, label and group; in microseconds, in order.
  std::map<std::string, std::vector<double>> ends;
};

/// How far each rank's clock is ahead of the first one's, in microseconds. A collective in which
/// every rank hears of every other ends everywhere at nearly the same time: between two hosts the
/// offset is the median over the collectives that ranks of both took part in. Empty for a rank
/// whose host has no collective with the others: its clock is as it is.
std::vector<std::optional<double>> clock_offsets(const std::vector<TraceClock>& clocks);

/// Whether a name in a trace is of a collective that ends everywhere at nearly the same time.
bool ends_everywhere_at_once(const std::string& name);

}  // namespace lockstep
