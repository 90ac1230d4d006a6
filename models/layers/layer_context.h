#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>

#include "lockstep/core/config.h"

namespace lockstep {

/// What every layer needs in order to be built.
struct LayerContext {
  TransformerConfig config;   ///< resolved
  at::TensorOptions options;  ///< dtype and device of the parameters
  uint64_t seed = 1234;       ///< of the initial weights
  std::string name = {};  ///< global name of the layer that is being built, ends in "." or empty

  /// The context of a child that is registered under `child_name`.
  LayerContext child(const std::string& child_name) const {
    return {config, options, seed, name + child_name + "."};
  }
};

}  // namespace lockstep
