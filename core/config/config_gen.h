#pragma once

// Internal: what the generated source of config.proto offers to config_io.cpp.

#include "lockstep/core/config.h"
#include "lockstep/core/config_io.h"

#include "core/config/config.pb.h"

namespace lockstep {

/// The fields of `message`, defaults filled in. Choices must have been checked before.
Config config_from_message(const proto::Config& message);

/// All fields of `value`, those at their default included.
proto::Config config_to_message(const Config& value);

}  // namespace lockstep
