#pragma once

// Internal: how the fronts for parameters on meshes reduce a gradient.

#include <string>
#include <vector>

#include "lockstep/distributed/gradient_scaling.h"
#include "lockstep/distributed/mesh_parameters.h"

namespace lockstep {

/// The axis of `description` that is called `name`. UsageError if the parameter lives on no such
/// axis.
MeshAxis axis_named(const std::string& name, const ParamDescription& description);

/// The axes of its mesh over which the gradient of a parameter is reduced. UsageError, naming the
/// parameter, for complete_axes on which it is not replicated.
std::vector<std::string> reduced_axes(const MeshParameter& param);

/// "['norm' on tp and cp]", complete_axes for comparing ranks; empty if there are none.
std::string complete_text(const MeshParameter& param);

/// The factor by which the terms of `ranks` ranks are multiplied before they are added. With `mean`
/// the sum is divided by the number of these ranks, or for a described parameter by the number of
/// ranks that split the batch, because experts and gradients that are also partial over tp are
/// summed over other ranks. Terms of a mean over another axis are divided by the ranks of that
/// axis, with or without `mean`.
ScalingFactor mesh_scaling(const MeshParameter& param, bool mean, int64_t ranks);

/// The placement of the gradient on `axis`, one of reduced_axes(), before it is reduced.
/// UsageError, naming the parameter, if no placement expresses it: a mean of an expert's gradient,
/// which has fewer replicas than the ranks that it is divided by.
Placement placement_of_terms(const MeshParameter& param, const std::string& axis, bool mean);

/// UsageError, naming `front` and the parameter, for one without a mesh that is described as cut or
/// partial over an axis other than dp and cp, as an expert or as tied.
void refuse_described_without_mesh(const MeshParameter& param, const char* front);

/// check_same_trained() of the described parameters that have a mesh, to be called before anything
/// that only the ranks that train a parameter call. Sends nothing if there are no such parameters.
void check_same_described(const MeshParameters& params);

}  // namespace lockstep
