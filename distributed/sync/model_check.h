#pragma once

// Internal: what must be the same on the ranks before their gradients share buffers.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/core/config_io.h"
#include "lockstep/core/parameters.h"
#include "lockstep/distributed/param_layout.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Compares what is reduced together, whatever else differs, and checks the descriptions:
///
/// - over dp-cp all parameters, the buffers of dense modules, `settings` and `units`. For experts
///   that are cut over etp or ep, the lengths that differ because of the cut are left out;
/// - over expert-dp, if its ranks are not those of dp-cp, the experts with all lengths, and their
///   buffers, `settings` and all `units`, since experts are gathered between the other units;
/// - over tp, etp and ep the parameters whose gradients are partial there, which of them share a
///   unit, and `settings`; and where the axis cuts a matrix that is whole in its buffer, all such
///   matrices, because Muon's update gathers them;
/// - over tp and etp, for parameters with complete gradients that several ranks hold, whole or in
///   pieces: whether they are trained and, for whole ones, whether they have weight decay. Each
///   rank may hold further parameters.
///
/// `units`: the unit of each parameter, if they are sharded by units.
///
/// As long as they agree, ranks send 8 bytes over dp-cp and for each of these four items that
/// concerns an axis of several ranks. CommunicationError, on every rank of the group, with the
/// first difference; the ranks outside are notified. `own_checks`, and errors of the descriptions:
/// as in check_same_parameters().
void check_same_model(const std::vector<NamedParameter>& parameters,
                      const std::vector<NamedParameter>& buffers, const ParallelState& state,
                      const std::vector<ConfigValue>& settings, const std::vector<int64_t>& units,
                      MatrixLayout matrices, const std::function<void()>& own_checks);

/// Compares, name by name, whether parameters are trained: over the ranks of tp, dp and cp, which
/// hold pieces or copies of them. Experts that ep cuts are compared over etp and edp. Each rank may
/// hold further parameters. Ranks send 8 bytes over each of these groups as long as they agree.
/// CommunicationError, on every rank of the group, with the first difference; the ranks outside are
/// notified.
void check_same_trained(const std::vector<NamedParameter>& parameters, const ParallelState& state);

/// Whether `text` is the same on all ranks of the grid that `axes` span. All of them get the same
/// answer. Sends 16 bytes per rank over each axis.
bool same_over_axes(const std::string& text, const std::vector<MeshAxis>& axes,
                    const ParallelState& state);

}  // namespace lockstep
