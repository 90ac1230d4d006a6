#include "lockstep/planner/machine.h"

#include <algorithm>
#include <cmath>

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

/// The time of `work`, which must not be less than the first point's.
double time_at(const std::vector<Machine::Point>& points, double work) {
  const auto next = std::find_if(points.begin(), points.end(),
                                 [&](const Machine::Point& point) { return point.work > work; });
  if (next == points.end()) return points.back().seconds * work / points.back().work;
  const Machine::Point& before = *(next - 1);
  const double way = std::log(work / before.work) / std::log(next->work / before.work);
  return before.seconds * std::pow(next->seconds / before.seconds, way);
}

bool is_fp8(const std::string& dtype) { return dtype.starts_with("Float8"); }

/// Forward or backward.
bool is_attention(const ProgramKernel& kernel) {
  constexpr const char* kForward = "aten::_scaled_dot_product_flash_attention";
  return kernel.name.starts_with(kForward);
}

double operator_time(const std::vector<Machine::Point>& points, double work) {
  const Machine::Point& first = points.front();
  return work < first.work ? first.seconds * work / first.work : time_at(points, work);
}

double collective_time(const std::vector<Machine::Point>& points, double bytes) {
  if (bytes <= points.front().work) return points.front().seconds;
  const auto next = std::find_if(points.begin(), points.end(),
                                 [&](const Machine::Point& point) { return point.work > bytes; });
  if (next == points.end()) return points.back().seconds * bytes / points.back().work;
  const Machine::Point& before = *(next - 1);
  return std::lerp(before.seconds, next->seconds,
                   (bytes - before.work) / (next->work - before.work));
}

/// Times of the kernel's dtype come before those of any dtype.
const Machine::Times* times_of(const std::vector<Machine::Times>& all,
                               const ProgramKernel& kernel) {
  const Machine::Times* of_any = nullptr;
  for (const Machine::Times& times : all) {
    if (times.name != kernel.name) continue;
    if (times.dtype == kernel.dtype) return &times;
    if (times.dtype.empty()) of_any = &times;
  }
  return of_any;
}

/// The name in machine files of the operation that `kind` works like.
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

/// The hosts of the ranks that take part in an operation.
HostPlacing placing_of(const ProgramCall& call, const RankList& ranks, int64_t position,
                       int64_t ranks_per_host) {
  if (!call.is_message() && call.operation.kind != Kind::exchange)
    return host_placing(ranks, ranks_per_host);
  return host_placing(
      {ranks[static_cast<size_t>(position)], ranks[static_cast<size_t>(call.operation.position)]},
      ranks_per_host);
}

bool is_all_to_all(Kind kind) {
  return kind == Kind::all_to_all || kind == Kind::all_to_all_rows || kind == Kind::all_to_all_dims;
}

/// The time of an all-to-all over several hosts in which each rank sends `bytes`.
double all_to_all_time(double bytes, const HostPlacing& at, double inside, double between) {
  const auto ranks = static_cast<double>(at.ranks), fewest = static_cast<double>(at.fewest);
  const double away = bytes * (ranks - fewest) / (ranks - 1), near = bytes - away;
  return std::max(away / between, near > 0 ? near / inside : 0);
}

/// The time of the bytes of any operation; see Machine::transfer().
double bytes_time(Kind kind, double bytes, const HostPlacing& at, double inside, double between) {
  if (at.hosts == 1) return bytes / inside;
  if (is_all_to_all(kind)) return all_to_all_time(bytes, at, inside, between);
  return bytes / std::min(static_cast<double>(at.fewest) * between, std::max(inside, between));
}

/// The time of an operation's consecutive steps, whatever its bytes; see Machine::transfer().
double latency(Kind kind, const HostPlacing& at, double inside, double between) {
  const auto hosts = static_cast<double>(at.hosts), ranks = static_cast<double>(at.ranks);
  const double ring = (hosts - 1) * between + (ranks - hosts) * inside;
  switch (kind) {
    case Kind::all_reduce: {
      const double chain = std::ceil(ranks / hosts) - 1;
      return 2 * std::min(ring, std::ceil(std::log2(hosts)) * between + chain * inside);
    }
    case Kind::reduce_scatter:
    case Kind::reduce_scatter_to_group:
    case Kind::all_gather:
    case Kind::gather_from_group:
    case Kind::broadcast:
      return ring;
    default:
      return at.hosts > 1 ? between : inside;
  }
}

}  // namespace

HostPlacing host_placing(const RankList& ranks, int64_t ranks_per_host) {
  std::vector<int64_t> hosts;
  hosts.reserve(ranks.size());
  for (const int64_t rank : ranks) hosts.push_back(rank / ranks_per_host);
  std::sort(hosts.begin(), hosts.end());
  const auto count = static_cast<int64_t>(ranks.size());
  HostPlacing placing = {count, 0, count};
  for (auto first = hosts.begin(); first != hosts.end();) {
    const auto next = std::upper_bound(first, hosts.end(), *first);
    ++placing.hosts;
    placing.fewest = std::min<int64_t>(placing.fewest, next - first);
    first = next;
  }
  return placing;
}

double Machine::peak_of(const std::string& dtype) const {
  if (dtype == "Float" || dtype == "Double") return wide_flops_per_s;
  return is_fp8(dtype) && fp8_flops_per_s > 0 ? fp8_flops_per_s : half_flops_per_s;
}

double Machine::seconds(const ProgramKernel& kernel) const {
  const auto bytes = static_cast<double>(kernel.bytes);
  if (const Times* const times = times_of(operators, kernel))
    return operator_time(times->points, kernel.flops > 0 ? kernel.flops : bytes);
  double time = bytes / (memory_bytes_per_s * share_of(memory, bytes));
  if (attention > 0 && is_attention(kernel))
    return std::max(time, kernel.flops / (peak_of(kernel.dtype) * attention));
  if (kernel.flops > 0) {
    const auto& shares = is_fp8(kernel.dtype) && !fp8_matrix.empty() ? fp8_matrix : matrix;
    time += kernel.flops / (peak_of(kernel.dtype) * share_of(shares, kernel.flops));
  }
  return time;
}

Machine::Transfer Machine::transfer(const ProgramCall& call, const RankList& ranks,
                                    int64_t position) const {
  const Kind kind = call.operation.kind;
  const auto bytes =
      static_cast<double>(ring_bytes(kind, call.bytes, static_cast<int64_t>(ranks.size())));
  const HostPlacing placing = placing_of(call, ranks, position, ranks_per_host);
  const bool inside = placing.hosts == 1;
  const Link& link = inside ? inside_host : between_hosts;
  require<ConfigError>(
      link.bytes_per_s > 0,
      "machine \"{}\": between_hosts is missing, and a host has {} ranks: {} are on several", name,
      ranks_per_host, group_text("ranks", ranks));
  const auto latency_of = [&](const HostPlacing& at) {
    return latency(kind, at, inside_host.latency_s, link.latency_s);
  };
  for (const Times& times : link.collectives)
    if (times.name == table_name(kind)) {
      const HostPlacing measured = {2, inside ? 1 : 2, 1};
      return {collective_time(times.points, bytes) + latency_of(placing) - latency_of(measured),
              link.occupancy};
    }
  const double time = bytes_time(kind, bytes, placing, inside_host.bytes_per_s, link.bytes_per_s);
  return {latency_of(placing) + time, link.occupancy};
}

}  // namespace lockstep
