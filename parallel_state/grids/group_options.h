#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/parallel_state/rank_grids.h"

namespace lockstep {

/// How the communicator of a group is created. Kinds of groups with the same ranks share one unless
/// their options differ.
struct GroupOptions {
  /// Timeout after which an unfinished communication fails. Unset: the job's.
  std::optional<std::chrono::milliseconds> timeout = {};
  /// NCCL's kernels run on streams of high priority. Has no meaning for Gloo; neither do the
  /// following fields.
  bool high_priority_stream = false;
  /// Bounds on the number of thread blocks (CTAs) that NCCL uses for one collective, and the number
  /// of blocks in a cluster. Unset: NCCL's choice.
  std::optional<int64_t> min_ctas = {};
  std::optional<int64_t> max_ctas = {};
  std::optional<int64_t> cga_cluster_size = {};

  auto operator<=>(const GroupOptions&) const = default;
};

/// "timeout_seconds=30, max_ctas=16"; empty if nothing is set.
std::string to_string(const GroupOptions& options);

/// Reads texts as in "dp-cp: timeout_seconds=30, high_priority_stream=true, min_ctas=4,
/// max_ctas=16, cga_cluster_size=2": the name of a kind of groups, then any of these. ConfigError
/// names parallel.group_options, what was found and what is allowed: an unknown or repeated name, a
/// value out of bounds.
std::map<GroupKind, GroupOptions> parse_group_options(const std::vector<std::string>& texts);

}  // namespace lockstep
