#pragma once

#include <cstdint>

#include "lockstep/core/config.h"
#include "lockstep/distributed/param_layout.h"

/// Which update a buffer's parameters take, and what it keeps. Plain arithmetic.
namespace lockstep {

enum class UpdateRule { adam, sgd, muon };

/// How DistributedDataParallel must lay out the matrices (ParamUpdate::matrix): whole for
/// optimizer.optimizer = muon, which updates them, cut for the others.
MatrixLayout matrix_layout(const OptimizerConfig& config);

/// The rule of a buffer. `whole_matrices`: it holds the matrices that Muon updates.
UpdateRule rule_of(OptimizerKind kind, bool whole_matrices);

/// Bytes of optimizer state for an element of a parameter of `param_bytes` bytes: master weights
/// of 4 bytes where it has 2, and moments.
int64_t state_bytes_of_element(const OptimizerConfig& config, UpdateRule rule, int64_t param_bytes);

}  // namespace lockstep
