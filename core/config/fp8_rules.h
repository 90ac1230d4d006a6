#pragma once

#include "lockstep/core/config.h"

/// The requirements of products in 8-bit floats on a configuration. Nothing here needs libtorch.
namespace lockstep {

/// Throws ConfigError, naming the field: fields of fp8 without train.fp8, and of delayed scaling
/// with another recipe; fp16 or fp64; rowwise scales with two formats; sequences of a rank of cp
/// that are not a multiple of 16 tokens; with latent attention and sequence parallelism,
/// micro-batches of a rank of tp that are not one; more layers left out than there are; recorded
/// steps. `config` is resolved.
void check_fp8(const Config& config);

/// Throws ConfigError, naming the field, if train.fp8 is left with no layer. Earlier versions
/// trained such models, so check_fp8() accepts them.
void check_fp8_in_use(const Config& config);

}  // namespace lockstep
