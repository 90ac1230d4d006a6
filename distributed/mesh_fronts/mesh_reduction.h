#pragma once

// Internal: how the fronts for parameters on meshes reduce a gradient.

#include <string>
#include <vector>

#include "lockstep/distributed/gradient_scaling.h"
#include "lockstep/distributed/mesh_parameters.h"

namespace lockstep {

/// The axis of `description` that is called `name`. UsageError if it lives on none.
MeshAxis axis_named(const std::string& name, const ParamDescription& description);

/// The axes of its mesh over which the gradient of a parameter is reduced. UsageError, naming the
/// parameter, for complete_axes on which it is not replicated.
std::vector<std::string> reduced_axes(const MeshParameter& param);

/// "['norm' on tp and cp]", complete_axes for comparing ranks; empty if there are none.
std::string complete_text(const MeshParameter& param);

/// What the terms are multiplied by before those of `ranks` ranks are added. With `mean` the sum is
/// divided by these, of a described parameter by the ranks that split the batch: experts and
/// gradients that are partial over tp too are summed over others. Terms of a mean over another axis
/// are divided by the ranks of that axis, `mean` or not.
ScalingFactor mesh_scaling(const MeshParameter& param, bool mean, int64_t ranks);

/// What the gradient is on `axis`, one of reduced_axes(), before it is reduced. UsageError, naming
/// the parameter, where no placement says it: a mean of an expert's gradient, whose replicas are
/// fewer than the ranks that it is divided by.
Placement placement_of_terms(const MeshParameter& param, const std::string& axis, bool mean);

/// UsageError, naming `front` and the parameter, for one without a mesh that is described as cut or
/// partial over another axis than dp and cp, as an expert or as tied.
void refuse_described_without_mesh(const MeshParameter& param, const char* front);

/// check_same_trained() of the described parameters that have a mesh, before anything that only the
/// ranks which train a parameter call. Sends nothing where there is none.
void check_same_described(const MeshParameters& params);

}  // namespace lockstep
