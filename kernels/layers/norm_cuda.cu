#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "lockstep/kernels/cuda_kernels.h"
#include "lockstep/kernels/norm_body.h"
#include "lockstep/kernels/norm_operands.h"
#include "lockstep/kernels/thread_block.cuh"

namespace lockstep::kernels {
namespace {

/// A block has 48 KiB unless it asks for more; the arrays of ThreadBlock's sums are part of them.
constexpr int64_t kSharedBytes = (48 << 10) - 1024;

template <bool kCentred, int kPack, class T>
__global__ void norm_kernel(NormRows<T> rows) {
  norm_rows<kCentred>(ThreadBlock<kPack>{}, rows, blockIdx.x, int64_t{blockIdx.x} + 1);
}

/// A block for each part of the rows. It adds up in shared memory if `shared`, else in place.
template <bool kCentred, int kPack, class T>
__global__ void norm_gradient_kernel(NormGradientRows<T> rows, int64_t num_rows,
                                     int64_t rows_a_part, Wide<T>* weight_parts,
                                     Wide<T>* bias_parts, bool shared) {
  extern __shared__ uint4 sums[];
  const int64_t first = blockIdx.x * rows_a_part, width = rows.width;
  const int64_t end = first + rows_a_part < num_rows ? first + rows_a_part : num_rows;
  Wide<T>* const own_weight = weight_parts ? weight_parts + blockIdx.x * width : nullptr;
  Wide<T>* const own_bias = bias_parts ? bias_parts + blockIdx.x * width : nullptr;
  auto* const shared_weight = reinterpret_cast<Wide<T>*>(sums);
  Wide<T>* const of_weight = shared && own_weight ? shared_weight : own_weight;
  Wide<T>* const of_bias = shared && own_bias ? shared_weight + width : own_bias;
  norm_gradient_rows<kCentred>(ThreadBlock<kPack>{}, rows, first, end, of_weight, of_bias);
  if (!shared || !own_weight) return;
  // Each thread copies only sums that it added up itself.
  ThreadBlock<kPack>::copy(width, own_weight, of_weight);
  if constexpr (kCentred) ThreadBlock<kPack>::copy(width, own_bias, of_bias);
}

template <bool kCentred, class T>
void launch_norm(const NormTensors& t) {
  const NormRows<T> a = t.rows<T>();
  const bool fit =
      packs_fit<T>({a.x, a.residual, a.weight, a.bias, a.sum, a.normalized}, {a.width});
  with_packs<T>(fit, [&](auto pack) {
    norm_kernel<kCentred, pack><<<static_cast<unsigned>(t.num_rows()), threads_for(a.width, pack),
                                  0, c10::cuda::getCurrentCUDAStream()>>>(a);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

template <bool kCentred, class T>
void launch_norm_gradient(const NormGradientTensors& t) {
  const NormGradientRows<T> a = t.rows<T>();
  auto *const weight_parts = elements<Wide<T>>(t.weight_parts), *const bias_parts =
                                                                    elements<Wide<T>>(t.bias_parts);
  const int64_t bytes = (kCentred ? 2 : 1) * a.width * static_cast<int64_t>(sizeof(Wide<T>));
  const bool shared = bytes <= kSharedBytes;
  const bool fit = packs_fit<T>(
      {a.grad, a.sum_grad, a.source, a.weight, a.input_grad, weight_parts, bias_parts}, {a.width});
  with_packs<T>(fit, [&](auto pack) {
    norm_gradient_kernel<kCentred, pack>
        <<<static_cast<unsigned>(t.num_parts), threads_for(a.width, pack), shared ? bytes : 0,
           c10::cuda::getCurrentCUDAStream()>>>(a, t.num_rows(), t.rows_a_part, weight_parts,
                                                bias_parts, shared);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace

void norm_cuda(const NormTensors& t) {
  if (t.num_rows() == 0) return;
  for_storage("norm", t.x.scalar_type(), [&](auto element) {
    using T = decltype(element);
    t.centred() ? launch_norm<true, T>(t) : launch_norm<false, T>(t);
  });
}

void norm_gradient_cuda(const NormGradientTensors& t) {
  if (t.num_rows() == 0) return;
  for_storage("norm", t.source.scalar_type(), [&](auto element) {
    using T = decltype(element);
    t.centred() ? launch_norm_gradient<true, T>(t) : launch_norm_gradient<false, T>(t);
  });
}

}  // namespace lockstep::kernels
