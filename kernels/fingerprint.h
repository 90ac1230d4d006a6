#pragma once

#include <ATen/core/Tensor.h>

namespace lockstep::kernels {

/// A number that tells whether two contiguous tensors have the same bits: the sum, modulo 2^64, of
/// word i times the odd number (2 i + 1) mod 2^32, over the tensor's memory as 32-bit words, the
/// last one padded with zeros. A change within one word always changes it, and so does swapping two
/// different words, unless they are a multiple of 2^31 words apart; any other change leaves it
/// unchanged only with the probability of a collision of sums. Returns a 0-dim int64 tensor on the
/// tensor's device, without waiting for the device.
at::Tensor fingerprint(const at::Tensor& tensor);

/// The same with libtorch's operators: for tensors on a device without a kernel of ours.
at::Tensor fingerprint_by_operators(const at::Tensor& tensor);

}  // namespace lockstep::kernels
