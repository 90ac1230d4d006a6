#pragma once

#include <cstdint>
#include <string_view>

#include "lockstep/core/config.h"

/// Which update a buffer's parameters take, and what it keeps. Plain arithmetic.
namespace lockstep {

enum class UpdateRule { adam, sgd, muon };

/// Whether Muon updates a parameter of GPTModel: with optimizer.optimizer = muon the matrices of
/// the transformer's layers ("decoder." in front of the name, two dimensions or more, of which the
/// last one is the columns), but not experts.
bool muon_updates(const OptimizerConfig& config, std::string_view name, int64_t dimensions,
                  bool is_expert);

/// The rule of a buffer. `whole_matrices`: it holds the matrices that Muon updates.
UpdateRule rule_of(OptimizerKind kind, bool whole_matrices);

/// Bytes of optimizer state for an element of a parameter of `param_bytes` bytes: master weights
/// of 4 bytes where it has 2, and moments.
int64_t state_bytes_of_element(const OptimizerConfig& config, UpdateRule rule, int64_t param_bytes);

}  // namespace lockstep
