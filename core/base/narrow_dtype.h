#pragma once

// Internal.

#include <c10/core/ScalarType.h>

namespace lockstep {

/// bf16 and fp16: the dtypes that are added up, and updated, in fp32.
constexpr bool is_narrow(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::BFloat16 || dtype == c10::ScalarType::Half;
}

}  // namespace lockstep
