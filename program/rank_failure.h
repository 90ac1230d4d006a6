#pragma once

// Internal.

#include <cstdint>
#include <exception>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/rank_message.h"
#include "lockstep/program/commands.h"

namespace lockstep {

/// How a rank that failed ends: with status 2 for a ConfigError and 1 for any other error.
inline ExitStatus failure_of_rank(int64_t rank, const std::exception& error) {
  const bool config_error = dynamic_cast<const ConfigError*>(&error) != nullptr;
  return {config_error ? 2 : 1, told_by_rank(rank, error.what())};
}

}  // namespace lockstep
