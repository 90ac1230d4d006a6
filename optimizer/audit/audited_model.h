#pragma once

// Internal.

#include <string>

#include "lockstep/optimizer/audit.h"
#include "lockstep/optimizer/audited_loop.h"

namespace lockstep {

/// UsageError naming `call`, on this rank: no model, or a step that is in progress.
void check_audited_model(const AuditedModel& model, const char* call);

/// UsageError naming `call`: those of audit(AuditedLoop).
void check_audited_loop(const AuditedLoop& loop, const char* call);

/// The report of all ranks from what each has, the same on all of them.
AuditReport report_of_all_ranks(const ParallelState& state, const std::string& scaling,
                                const AuditedRank& own);

}  // namespace lockstep
