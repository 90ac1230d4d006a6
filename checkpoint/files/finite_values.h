#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "lockstep/core/error.h"

namespace lockstep {

/// The weights of a run are not finite, so they are not saved. Names the tensor.
class DivergenceError : public FileError {
 public:
  using FileError::FileError;
};

/// How many elements of `dtype`, as safetensors calls it, among `bytes` bytes are NaN or infinite.
/// For integer dtypes none are.
int64_t count_not_finite(std::string_view dtype, const void* data, int64_t bytes);

/// Whether elements of this part of a run's state (StateTensor::state) must be finite: those of
/// weights and master weights must. The optimizer's state may be infinite, for example if the
/// square of a finite gradient is infinite.
bool must_be_finite(std::string_view state);

/// "tensor 'w': found 2 of 10 elements that are not finite, allowed: none"
std::string describe_not_finite(std::string_view tensor, int64_t count, int64_t elements);

}  // namespace lockstep
