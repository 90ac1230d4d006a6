#pragma once

// Internal: the model in one process.

#include <memory>

#include "lockstep/testing/model_check.h"

namespace lockstep::testing {

/// Makes the whole model while libtorch's default CPU generator is seeded with context.seed (see
/// CheckOptions::seed).
std::shared_ptr<torch::nn::Module> make_whole_model(const MakeModule& make,
                                                    const ParallelContext& context);

}  // namespace lockstep::testing
