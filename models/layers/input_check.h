#pragma once

// Internal.

#include <string>

#include <ATen/core/Tensor.h>

#include "lockstep/models/token_positions.h"

namespace lockstep {

/// UsageError, "<label>: found an input [2, 3] of Float, allowed: [..., 4] of Double", unless
/// `input` has `width` as its last dimension, at least `dims` dimensions and the dtype of `weight`.
/// Looks only at sizes: nothing is read from a device.
void check_input(const at::Tensor& input, int64_t width, const at::Tensor& weight,
                 const std::string& label, int64_t dims = 1);

/// The same for the dtypes that a normalization accepts with its weights: theirs, and bf16 and fp16
/// with fp32.
void check_normalized(const at::Tensor& input, const at::Tensor& weight, const std::string& label);

/// UsageError, "<label>: found an input [2, 3] of Float, allowed: [<dims>, 4] of Double".
[[noreturn]] void refuse_input(const at::Tensor& input, const char* dims, int64_t width,
                               at::ScalarType dtype, const std::string& label);

/// UsageError, "<label>: found 7 tokens in all, allowed: 8, in documents of >= 1", unless
/// `documents` are those of `sequences` sequences of `length` tokens, which is counted over all
/// ranks of cp and before sequence parallelism cuts them.
void check_sequence_documents(const SequenceDocuments& documents, int64_t sequences, int64_t length,
                              const char* label);

/// "[2, 3] of Float"
std::string form_of(const at::Tensor& tensor);

}  // namespace lockstep
