#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/parallel_state/job_program.h"

/// How many bytes of a job travel inside a host, and how many between hosts. Needs no libtorch.
namespace lockstep {

/// The data that the ranks of all groups with one name send in one training step.
struct LinkUse {
  std::string group;           ///< "dp-cp"
  int64_t ranks = 0;           ///< of the largest group
  int64_t operations = 0;      ///< collectives and messages that ranks start
  int64_t inside_bytes = 0;    ///< to ranks of their own host
  int64_t between_bytes = 0;   ///< to ranks of other hosts
  int64_t most_of_a_rank = 0;  ///< the most bytes that one rank sends
};

struct LinkPlan {
  int64_t ranks_per_host = 0;
  int64_t hosts = 0;
  std::vector<LinkUse> groups = {};  ///< by name

  int64_t inside_bytes() const;
  int64_t between_bytes() const;
};

/// The plan for the last step of `job`. Rank r is on host r / ranks_per_host.
///
/// Collectives count as in a ring of the group's N ranks in their order, which needs the fewest
/// bytes. A rank sends to the next one: for an all-reduce 2 (N - 1) / N of its tensor, for a
/// reduce-scatter (N - 1) / N of its input, for an all-gather N - 1 times its input, for a
/// broadcast its tensor, except the rank before the source. An all-to-all sends 1 / N of its input
/// to each of the others. A message sends its tensor. Comparisons of ranks do not count.
///
/// ConfigError: ranks_per_host below 1. UsageError as for JobGroups, or for a job without a step.
LinkPlan plan_links(const JobProgram& job, int64_t ranks_per_host);

}  // namespace lockstep
