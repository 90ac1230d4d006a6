#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/optimizer/audit_comparison.h"
#include "lockstep/optimizer/audit_report.h"

namespace lockstep {

/// The audit of a step of `lockstep train`, which says what becomes of each gradient according to
/// the configuration and to what the layers declare about their parameters: see expected_audit.h.
/// `config` is resolved. `world_size` unset: the fewest ranks, as in plan_memory(). `ranks`: the
/// ranks to report; none: all. ConfigError naming the field: sizes that do not fit. UsageError: a
/// rank outside the world.
AuditReport plan_audit(const Config& config, std::optional<int64_t> world_size = {},
                       const std::vector<int64_t>& ranks = {});

}  // namespace lockstep
