#pragma once

// Internal: what descriptions ask for that a front does not do.

#include <vector>

#include "lockstep/core/parameters.h"
#include "lockstep/parallel_state/rank_grids.h"

namespace lockstep {

/// UsageError, naming `front`, parameter and axis, if DescribedModule::add() cut a parameter by
/// other numbers of ranks than `grids` has: its model was made for another ParallelState.
void refuse_other_cuts(const std::vector<NamedParameter>& parameters, const RankGrids& grids,
                       const char* front);

/// A data-parallel reduction adds the terms of all ranks. UsageError, naming parameter and axis,
/// for a gradient that is declared otherwise over an axis of several ranks that splits the batch.
void require_partial_sums(const NamedParameter& param, const RankGrids& grids);

/// The check for a front that sees the parameters of one rank alone. UsageError, naming `front`,
/// parameter and tie, if a trained parameter may have a tied copy elsewhere, because there are
/// several pipeline stages or another of `parameters` has the same tie.
void refuse_ties(const std::vector<NamedParameter>& parameters, const RankGrids& grids,
                 const char* front);

/// The check for a front that averages all gradients over the ranks of dp-cp and does nothing else.
/// UsageError, naming `front`, parameter and axis or group: what require_partial_sums() and
/// refuse_ties() refuse; a gradient that is partial over another axis of several ranks; an expert
/// that is replicated over ranks other than dp-cp. Frozen parameters pass.
void require_dp_cp_averages(const std::vector<NamedParameter>& parameters, const RankGrids& grids,
                            int64_t rank, const char* front);

/// The same if the grids are not known: refuses every gradient that is declared partial over
/// another axis, every expert and every tie, however many ranks there are.
void require_no_model_axes(const std::vector<NamedParameter>& parameters, const char* front);

}  // namespace lockstep
