// The CUDA kernels of a build without CUDA. No CUDA tensor can exist there, so nothing calls them.

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/kernels/adamw_cuda.h"
#include "lockstep/kernels/sgd_cuda.h"
#include "lockstep/kernels/sum_of_squares_cuda.h"

namespace lockstep::kernels {
namespace {

[[noreturn]] void refuse(const char* kernel) {
  fail<UsageError>("{}: found CUDA tensors, but this build has no CUDA (LOCKSTEP_CUDA)", kernel);
}

}  // namespace

void adamw_cuda(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                const at::Tensor&, const std::vector<UpdateSegment>&, const AdamWScalars&,
                const StepControl&) {
  refuse("adamw");
}

void sgd_cuda(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
              const std::vector<UpdateSegment>&, const SgdScalars&, const StepControl&) {
  refuse("sgd");
}

at::Tensor sum_of_squares_cuda(const at::Tensor&) { refuse("sum_of_squares"); }

}  // namespace lockstep::kernels
