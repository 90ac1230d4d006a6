#pragma once

// Internal.

#include "lockstep/optimizer/audit.h"

namespace lockstep {

/// UsageError naming `call`, on this rank: no model, or a step that is under way.
void check_audited_model(const AuditedModel& model, const char* call);

/// The report of all ranks from what each has, the same on all of them.
AuditReport report_of_all_ranks(const AuditedModel& model, const AuditedRank& own);

}  // namespace lockstep
