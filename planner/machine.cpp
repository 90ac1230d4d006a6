#include "lockstep/planner/machine.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "lockstep/core/check.h"
#include "lockstep/planner/ring_bytes.h"

namespace lockstep {
namespace {

using Kind = CollectiveOperation::Kind;

double share_of(const std::vector<Machine::Efficiency>& shares, double work) {
  const auto found =
      std::find_if(shares.begin(), shares.end(), [&](const auto& one) { return work >= one.from; });
  return found == shares.end() ? 1 : found->share;
}

/// Of work that is no less than the first point's.
double time_at(const std::vector<Machine::Point>& points, double work) {
  const auto next = std::find_if(points.begin(), points.end(),
                                 [&](const Machine::Point& point) { return point.work > work; });
  if (next == points.end()) return points.back().seconds * work / points.back().work;
  const Machine::Point& before = *(next - 1);
  const double way = std::log(work / before.work) / std::log(next->work / before.work);
  return before.seconds * std::pow(next->seconds / before.seconds, way);
}

double operator_time(const std::vector<Machine::Point>& points, double work) {
  const Machine::Point& first = points.front();
  return work < first.work ? first.seconds * work / first.work : time_at(points, work);
}

double collective_time(const std::vector<Machine::Point>& points, double bytes) {
  return time_at(points, std::max(bytes, points.front().work));
}

const Machine::Times* times_of(const std::vector<Machine::Times>& all,
                               const ProgramKernel& kernel) {
  const auto found = std::find_if(all.begin(), all.end(), [&](const Machine::Times& times) {
    return times.name == kernel.name && (times.dtype.empty() || times.dtype == kernel.dtype);
  });
  return found == all.end() ? nullptr : &*found;
}

/// As machine files call what works like `kind`.
const char* table_name(Kind kind) {
  switch (kind) {
    case Kind::all_reduce:
      return "all_reduce";
    case Kind::reduce_scatter:
    case Kind::reduce_scatter_to_group:
      return "reduce_scatter";
    case Kind::all_gather:
    case Kind::gather_from_group:
      return "all_gather";
    case Kind::all_to_all:
    case Kind::all_to_all_rows:
    case Kind::all_to_all_dims:
      return "all_to_all";
    case Kind::broadcast:
      return "broadcast";
    case Kind::send:
      return "send";
    case Kind::exchange:
      return "exchange";
    case Kind::receive:
    case Kind::scatter_to_group:
    case Kind::comparison:
      break;
  }
  return "";
}

/// How many of the ranks are on the host that has the fewest of them; 0 where all are on one.
int64_t fewest_of_a_host(const ProgramCall& call, const RankList& ranks, int64_t position,
                         int64_t ranks_per_host) {
  std::map<int64_t, int64_t> on_host;
  if (call.is_message() || call.operation.kind == Kind::exchange) {
    for (const int64_t end : {position, call.operation.position})
      on_host[ranks[static_cast<size_t>(end)] / ranks_per_host] = 1;
  } else {
    for (const int64_t rank : ranks) ++on_host[rank / ranks_per_host];
  }
  if (on_host.size() == 1) return 0;
  int64_t fewest = ranks_per_host;
  for (const auto& [host, count] : on_host) fewest = std::min(fewest, count);
  return fewest;
}

}  // namespace

double Machine::seconds(const ProgramKernel& kernel) const {
  const auto bytes = static_cast<double>(kernel.bytes);
  if (const Times* const times = times_of(operators, kernel))
    return operator_time(times->points, kernel.flops > 0 ? kernel.flops : bytes);
  double time = bytes / (memory_bytes_per_s * share_of(memory, bytes));
  if (kernel.flops > 0) {
    const bool wide = kernel.dtype == "Float" || kernel.dtype == "Double";
    time += kernel.flops /
            ((wide ? wide_flops_per_s : half_flops_per_s) * share_of(matrix, kernel.flops));
  }
  return time;
}

Machine::Transfer Machine::transfer(const ProgramCall& call, const RankList& ranks,
                                    int64_t position) const {
  const auto bytes = static_cast<double>(
      ring_bytes(call.operation.kind, call.bytes, static_cast<int64_t>(ranks.size())));
  const int64_t fewest = fewest_of_a_host(call, ranks, position, ranks_per_host);
  const Link& link = fewest == 0 ? inside_host : between_hosts;
  require<ConfigError>(
      link.bytes_per_s > 0,
      "machine \"{}\": between_hosts is missing, and a host has {} ranks: ranks {} "
      "are on several",
      name, ranks_per_host, fmt::join(ranks, ", "));
  for (const Times& times : link.collectives)
    if (times.name == table_name(call.operation.kind))
      return {collective_time(times.points, bytes), link.occupancy};
  const double rate = fewest == 0 ? link.bytes_per_s
                                  : std::min(static_cast<double>(fewest) * link.bytes_per_s,
                                             std::max(inside_host.bytes_per_s, link.bytes_per_s));
  return {link.latency_s + bytes / rate, link.occupancy};
}

}  // namespace lockstep
