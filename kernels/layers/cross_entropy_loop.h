#pragma once

// Internal: the CPU loops of cross entropy, without libtorch; see adamw_loop.h.

#include <cstdint>

#include "lockstep/kernels/cross_entropy_rows.h"

namespace lockstep::kernels {

/// Rows `first` to `end`, with the sum of the logits if `smoothed`; see cross_entropy_rows().
void cross_entropy_loop(bool smoothed, const CrossEntropyRows<float>& a, int64_t first,
                        int64_t end);
void cross_entropy_loop(bool smoothed, const CrossEntropyRows<double>& a, int64_t first,
                        int64_t end);
void cross_entropy_loop(bool smoothed, const CrossEntropyRows<Bf16>& a, int64_t first, int64_t end);
void cross_entropy_loop(bool smoothed, const CrossEntropyRows<Fp16>& a, int64_t first, int64_t end);

/// Tokens `first` to `end`.
void cross_entropy_losses_loop(const CrossEntropyLosses<float>& a, int64_t first, int64_t end);
void cross_entropy_losses_loop(const CrossEntropyLosses<double>& a, int64_t first, int64_t end);

/// Rows `first` to `end`; see cross_entropy_gradient_rows().
void cross_entropy_gradient_loop(const CrossEntropyGradientRows<float>& a, int64_t first,
                                 int64_t end);
void cross_entropy_gradient_loop(const CrossEntropyGradientRows<double>& a, int64_t first,
                                 int64_t end);
void cross_entropy_gradient_loop(const CrossEntropyGradientRows<Bf16>& a, int64_t first,
                                 int64_t end);
void cross_entropy_gradient_loop(const CrossEntropyGradientRows<Fp16>& a, int64_t first,
                                 int64_t end);

}  // namespace lockstep::kernels
