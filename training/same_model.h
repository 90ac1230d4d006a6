#pragma once

// Internal.

#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/core/config.h"

namespace lockstep {

/// ConfigError, naming the field: `config` has another value than the run that saved the checkpoint
/// in a field that changes the shapes of the weights or what they compute. `starts_adapters`: see
/// Trainer. FileError: the checkpoint's configuration is damaged.
void check_same_model(CheckpointReader& checkpoint, const Config& config, bool starts_adapters);

}  // namespace lockstep
