#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/parallel_state/rank_grids.h"

namespace lockstep {

/// How the communicator of a group is made. Kinds of groups with the same ranks share one unless
/// their options differ.
struct GroupOptions {
  /// Time after which a communication that does not end fails. Unset: the job's.
  std::optional<std::chrono::milliseconds> timeout = {};
  /// NCCL's kernels run on streams of high priority. Without meaning for Gloo, like what follows.
  bool high_priority_stream = false;
  /// Bounds of the thread blocks (CTAs) that NCCL uses for one collective, and the number of blocks
  /// in a cluster. Unset: NCCL's choice.
  std::optional<int64_t> min_ctas = {};
  std::optional<int64_t> max_ctas = {};
  std::optional<int64_t> cga_cluster_size = {};

  auto operator<=>(const GroupOptions&) const = default;
};

/// "timeout_seconds=30, max_ctas=16"; empty where nothing is set.
std::string to_string(const GroupOptions& options);

/// Reads texts as in "dp-cp: timeout_seconds=30, high_priority_stream=true, min_ctas=4,
/// max_ctas=16, cga_cluster_size=2": the name of a kind of groups, then any of these. ConfigError
/// names parallel.group_options, what was found and what is allowed: an unknown or repeated name, a
/// value out of its bounds.
std::map<GroupKind, GroupOptions> parse_group_options(const std::vector<std::string>& texts);

}  // namespace lockstep
