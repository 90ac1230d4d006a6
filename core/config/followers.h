#pragma once

// Internal.

#include <string>
#include <vector>

#include "core/config/config.pb.h"

namespace lockstep {

/// In an effective configuration (print_config()), the ends of the weight decay and data.split have
/// the values of what they follow where they are unset. If one of `overrides` ("path=value") names
/// what they follow, clears those that no override names, so that it reaches them.
void forget_followers(const std::vector<std::string>& overrides, proto::Config* config);

}  // namespace lockstep
