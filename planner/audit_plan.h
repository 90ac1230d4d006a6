#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/optimizer/audit_comparison.h"
#include "lockstep/optimizer/audit_report.h"

namespace lockstep {

/// What a step of `lockstep train` makes of each gradient, from the configuration and from what the
/// layers state of their parameters: see expected_audit.h. `config` is resolved. `world_size`
/// unset: the fewest ranks, as plan_memory(). `ranks`: those that are reported; none: all.
/// ConfigError naming the field: sizes that do not fit. UsageError: a rank outside the world.
AuditReport plan_audit(const Config& config, std::optional<int64_t> world_size = {},
                       const std::vector<int64_t>& ranks = {});

}  // namespace lockstep
