#pragma once

#include <optional>
#include <string_view>

#include "lockstep/core/config.h"

namespace lockstep {

/// Peak arithmetic rate of a GPU with dense matrices, in TFLOP/s, according to the vendor's data
/// sheet. `model` is its name as reported by the driver, "NVIDIA H100 80GB HBM3". Empty for a model
/// that is not in the table, and for fp32 and fp64, whose rate depends on which units the library
/// uses.
std::optional<double> peak_tflops(std::string_view model, Precision precision);

}  // namespace lockstep
