#pragma once

// Internal: the CPU loops of dropout, without libtorch; see adamw_loop.h.

#include <cstdint>

#include "lockstep/kernels/dropout_rows.h"

namespace lockstep::kernels {

/// Rows `first` to `end`.
void dropout_loop(const DropoutRows<float>& a, int64_t first, int64_t end);
void dropout_loop(const DropoutRows<double>& a, int64_t first, int64_t end);
void dropout_loop(const DropoutRows<Bf16>& a, int64_t first, int64_t end);
void dropout_loop(const DropoutRows<Fp16>& a, int64_t first, int64_t end);

}  // namespace lockstep::kernels
