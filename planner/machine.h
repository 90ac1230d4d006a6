#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/parallel_state/rank_program.h"

/// The rates of a cluster's devices and links, and how long a kernel or a collective takes on them.
/// Needs no libtorch.
namespace lockstep {

/// How ranks lie on hosts.
struct HostPlacing {
  int64_t ranks = 0, hosts = 0;
  int64_t fewest = 0;  ///< ranks on the host that has the fewest
  auto operator<=>(const HostPlacing&) const = default;
};

/// Rank r is on host r / `ranks_per_host`.
HostPlacing host_placing(const RankList& ranks, int64_t ranks_per_host);

struct Machine {
  /// The share of the peak that work of size at least `from` reaches.
  struct Efficiency {
    double from = 0, share = 1;
  };
  /// How long a piece of work took. Work as machine.proto counts it.
  struct Point {
    double work = 0, seconds = 0;
  };
  /// Measured times of an operator or a collective, by increasing work.
  struct Times {
    std::string name = {};
    std::string dtype = {};  ///< of an operator's result; empty: of any
    std::vector<Point> points = {};
  };
  struct Link {
    double bytes_per_s = 0;  ///< of one device in one direction, as collectives get them
    double latency_s = 0;    ///< of each step of an operation
    double occupancy = 0;    ///< share of the device that is unavailable to kernels meanwhile
    std::vector<Times> collectives = {};
  };

  std::string name = {};
  int64_t ranks_per_host = 1;
  int64_t cores = 0;  ///< of a host, which more ranks share; 0: each rank has its own device
  double half_flops_per_s = 0;  ///< peak of matrix products in bf16 and fp16
  double wide_flops_per_s = 0;  ///< of fp32 and fp64
  double fp8_flops_per_s = 0;   ///< of 8-bit floats; 0: as bf16
  double memory_bytes_per_s = 0;
  std::vector<Efficiency> matrix = {};      ///< by operations, the largest first
  std::vector<Efficiency> fp8_matrix = {};  ///< of 8-bit floats; empty: as `matrix`
  std::vector<Efficiency> memory = {};      ///< by bytes, the largest first
  double attention = 0;  ///< share of the peak that fused attention reaches; 0: unknown
  Link inside_host = {};
  Link between_hosts = {};   ///< without bytes_per_s there is no such link
  double launch_s = 0;       ///< host time to launch a kernel or a collective
  bool synchronous = false;  ///< the host runs the kernels itself
  std::vector<Times> operators = {};

  /// The cost of an operation over a link.
  struct Transfer {
    double seconds = 0;
    double occupancy = 0;
  };

  /// Peak of matrix products of `dtype` operands ("BFloat16"), in operations per second.
  double peak_of(const std::string& dtype) const;

  /// Seconds that a device takes for `kernel`: what was measured for its operator and dtype;
  /// otherwise its matrix products at their rate, and then its bytes. Fused attention takes its own
  /// rate, if the machine has one, or the time of its bytes if that is longer.
  double seconds(const ProgramKernel& kernel) const;

  /// The time from when all of `ranks` have started `call` until it is done: the latency of its
  /// steps, and the bytes that plan_links() counts for a rank over the link. All-gathers,
  /// reduce-scatters and broadcasts take the steps of a ring of N ranks on H hosts, H - 1 between
  /// hosts and N - H inside. All-reduces take twice as many or, if that is less, twice those of a
  /// tree: log2 H between hosts and the chain of a host's ranks. Others take one. What was measured
  /// for such a collective on the link, between two ranks, replaces both, and the steps beyond
  /// those of two ranks are added. Between hosts the ring passes through as many devices of a host
  /// as the group has there, but no faster than inside. In an all-to-all each rank sends what goes
  /// to other hosts over a link of its own, and the rest inside meanwhile; the host with the fewest
  /// ranks takes longest. A message or exchange takes the link between its two ends.
  /// ConfigError if the ranks are on several hosts and there is no link between them.
  Transfer transfer(const ProgramCall& call, const RankList& ranks, int64_t position) const;
};

/// Reads a machine file, see machine.proto. `origin` names it in errors. ConfigError with line and
/// column, or the field, what was found and what is allowed.
Machine parse_machine(const std::string& text, const std::string& origin);

/// FileError if it cannot be read; otherwise as parse_machine().
Machine load_machine(const std::string& path);

/// A machine file from which parse_machine() makes the same machine, except for the last bits of
/// numbers that the file states in other units.
std::string machine_text(const Machine& machine);

}  // namespace lockstep
