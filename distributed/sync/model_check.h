#pragma once

// Internal: what the ranks must have alike before their gradients share buffers.

#include <functional>
#include <string>
#include <vector>

#include "lockstep/core/config_io.h"
#include "lockstep/core/parameters.h"
#include "lockstep/distributed/param_layout.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Compares what is reduced together, whatever differs beside it, and checks the descriptions:
///
/// - over dp-cp all parameters and `settings`. Of experts that are cut over etp or ep the lengths
///   that differ by that are left out;
/// - over expert-dp, where it has other ranks than dp-cp, the experts with all lengths;
/// - over tp, etp and ep the parameters whose gradients are partial there, and `settings`; and
///   where it cuts a matrix that lies whole all of these, because Muon's update gathers them.
///
/// - over tp and etp, of parameters with complete gradients that several ranks hold, whole or in
///   pieces, whether they are trained, and of whole ones, with weight decay. Each may hold others
///   besides.
///
/// Ranks send 8 bytes over dp-cp and for each line that an axis of several ranks has, while they
/// agree. CommunicationError, on every rank of the group, with the first difference; the ranks
/// outside are told. `own_checks`, and errors of the descriptions: as in check_same_parameters().
void check_same_model(const std::vector<NamedParameter>& parameters, const ParallelState& state,
                      const std::vector<ConfigValue>& settings, MatrixLayout matrices,
                      const std::function<void()>& own_checks);

/// Compares, name by name, whether parameters are trained: over the ranks of tp, dp and cp, which
/// hold pieces or copies of them. Experts that ep cuts are compared over etp and edp. Each rank may
/// hold others besides. Ranks send 8 bytes over each of these groups while they agree.
/// CommunicationError, on every rank of the group, with the first difference; the ranks outside are
/// told.
void check_same_trained(const std::vector<NamedParameter>& parameters, const ParallelState& state);

/// Whether `text` is the same on all ranks of the grid that `axes` span. All of them get the same
/// answer. Sends 16 bytes per rank over each axis.
bool same_over_axes(const std::string& text, const std::vector<MeshAxis>& axes,
                    const ParallelState& state);

}  // namespace lockstep
