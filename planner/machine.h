#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/parallel_state/rank_program.h"

/// What the devices and links of a cluster can do, and what that makes of a kernel or a collective.
/// Needs no libtorch.
namespace lockstep {

struct Machine {
  /// The share of the peak that work of at least `from` gets.
  struct Efficiency {
    double from = 0, share = 1;
  };
  struct Link {
    double bytes_per_s = 0;  ///< of one device in one direction, as collectives get them
    double latency_s = 0;
  };

  std::string name;
  int64_t ranks_per_host = 1;
  double half_flops_per_s = 0;  ///< peak of products of bf16 and fp16 matrices
  double wide_flops_per_s = 0;  ///< of fp32 and fp64
  double memory_bytes_per_s = 0;
  std::vector<Efficiency> matrix = {};  ///< by operations, the largest first
  std::vector<Efficiency> memory = {};  ///< by bytes, the largest first
  Link inside_host = {}, between_hosts = {};

  /// Seconds that a device takes for `kernel`: its products at their rate, and then its bytes.
  double seconds(const ProgramKernel& kernel) const;

  /// Seconds from when all ranks have started `call` until it is done, among `ranks`: a latency and
  /// the bytes that plan_links() counts for a rank over the link. Between hosts the ring passes
  /// through as many devices of a host as the group has there, but no faster than inside. A message
  /// or exchange takes the link between its two ends.
  double seconds(const ProgramCall& call, const RankList& ranks, int64_t position) const;
};

/// Reads a machine file, see machine.proto. `origin` names it in errors. ConfigError with line and
/// column, or the field and what is allowed.
Machine parse_machine(const std::string& text, const std::string& origin);

/// FileError where it cannot be read; else as parse_machine().
Machine load_machine(const std::string& path);

}  // namespace lockstep
