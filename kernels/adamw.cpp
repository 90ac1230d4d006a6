#include "lockstep/kernels/adamw.h"

#include <algorithm>
#include <array>
#include <type_traits>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "lockstep/core/check.h"
#include "lockstep/kernels/adamw_cuda.h"
#include "lockstep/kernels/adamw_loop.h"

namespace lockstep::kernels {
namespace {

void check(const at::Tensor& tensor, const char* name, const at::Tensor& master,
           at::ScalarType dtype) {
  require<UsageError>(tensor.is_contiguous() && tensor.numel() == master.numel() &&
                          tensor.scalar_type() == dtype && tensor.device() == master.device(),
                      "adamw: {} is {} elements of {} on {}, allowed: {} contiguous elements of {} "
                      "on {}",
                      name, tensor.numel(), at::toString(tensor.scalar_type()),
                      tensor.device().str(), master.numel(), at::toString(dtype),
                      master.device().str());
}

/// Raw pointers of one call on the CPU.
template <class T>
struct Pointers {
  T* p;
  const T* g;  ///< null where the gradients are low_precision_grad
  T* m;
  T* v;
  const uint16_t* low_precision_grad = nullptr;
  uint16_t* low_precision = nullptr;

  void run(int64_t start, int64_t end, const AdamWScalars& scalars, bool weight_decay) const {
    if constexpr (std::is_same_v<T, float>) {
      if (low_precision_grad || low_precision) return run_mixed(start, end, scalars, weight_decay);
    }
    adamw_loop(p + start, g + start, m + start, v + start, end - start, scalars, weight_decay);
  }

  /// Block by block, so that what is converted is in the cache.
  void run_mixed(int64_t start, int64_t end, const AdamWScalars& scalars,
                 bool weight_decay) const requires std::is_same_v<T, float> {
    constexpr int64_t kBlock = 2048;
    std::array<float, kBlock> wide;
    for (; start < end; start += kBlock) {
      const int64_t n = std::min(kBlock, end - start);
      const float* grad = g ? g + start : wide.data();
      if (low_precision_grad) widen_bf16_loop(low_precision_grad + start, wide.data(), n);
      adamw_loop(p + start, grad, m + start, v + start, n, scalars, weight_decay);
      if (low_precision) round_to_bf16_loop(p + start, low_precision + start, n);
    }
  }
};

const uint16_t* bf16_bits(const at::Tensor& tensor) {
  return reinterpret_cast<const uint16_t*>(tensor.const_data_ptr<at::BFloat16>());
}

template <class T>
void adamw_cpu(const Pointers<T>& pointers, const std::vector<AdamWSegment>& segments,
               const AdamWScalars& scalars) {
  if (segments.empty()) return;
  constexpr int64_t kGrain = 1 << 16;  // elements that are worth a thread
  at::parallel_for(
      segments.front().start, segments.back().end, kGrain, [&](int64_t begin, int64_t end) {
        auto segment = std::partition_point(segments.begin(), segments.end(),
                                            [&](const auto& s) { return s.end <= begin; });
        for (; segment != segments.end() && segment->start < end; ++segment)
          pointers.run(std::max(begin, segment->start), std::min(end, segment->end), scalars,
                       segment->weight_decay);
      });
}

void check_segments(const std::vector<AdamWSegment>& segments, int64_t numel) {
  int64_t end = 0;
  for (const AdamWSegment& segment : segments) {
    require<UsageError>(segment.start >= end && segment.start < segment.end && segment.end <= numel,
                        "adamw: segment [{}, {}) after {} in {} elements; allowed: non-empty "
                        "segments in order",
                        segment.start, segment.end, end, numel);
    end = segment.end;
  }
}

}  // namespace

void adamw(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& exp_avg,
           const at::Tensor& exp_avg_sq, const at::Tensor& low_precision,
           const std::vector<AdamWSegment>& segments, const AdamWScalars& scalars) {
  const at::ScalarType dtype = master.scalar_type();
  require<UsageError>(dtype == at::kFloat || dtype == at::kDouble,
                      "adamw: the master weights are {}, allowed: Float, Double",
                      at::toString(dtype));
  check(master, "master", master, dtype);
  const bool low_precision_grad = grad.scalar_type() == at::kBFloat16 && dtype == at::kFloat;
  check(grad, "grad", master, low_precision_grad ? at::kBFloat16 : dtype);
  check(exp_avg, "exp_avg", master, dtype);
  check(exp_avg_sq, "exp_avg_sq", master, dtype);
  if (low_precision.defined()) check(low_precision, "low_precision", master, at::kBFloat16);
  require<UsageError>(!low_precision.defined() || dtype == at::kFloat,
                      "adamw: a bf16 copy needs fp32 master weights");
  check_segments(segments, master.numel());
  if (master.is_cuda())
    return adamw_cuda(master, grad, exp_avg, exp_avg_sq, low_precision, segments, scalars);
  if (dtype == at::kDouble)
    return adamw_cpu<double>({master.data_ptr<double>(), grad.const_data_ptr<double>(),
                              exp_avg.data_ptr<double>(), exp_avg_sq.data_ptr<double>()},
                             segments, scalars);
  Pointers<float> pointers{master.data_ptr<float>(), nullptr, exp_avg.data_ptr<float>(),
                           exp_avg_sq.data_ptr<float>()};
  if (low_precision_grad)
    pointers.low_precision_grad = bf16_bits(grad);
  else
    pointers.g = grad.const_data_ptr<float>();
  if (low_precision.defined())
    pointers.low_precision = reinterpret_cast<uint16_t*>(low_precision.data_ptr<at::BFloat16>());
  adamw_cpu(pointers, segments, scalars);
}

}  // namespace lockstep::kernels
