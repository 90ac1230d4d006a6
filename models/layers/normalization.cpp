#include "lockstep/models/normalization.h"

#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/models/input_check.h"

namespace lockstep {

Norm::Norm(const ParallelContext& context, const ModuleSpec& spec, Normalization kind,
           double epsilon)
    : kind_(kind), epsilon_(epsilon), label_(context.label()) {
  require<UsageError>(std::isfinite(epsilon) && epsilon >= 0,
                      "{}: epsilon: found {}, allowed: a finite number >= 0", label_, epsilon);
  weight_ = add(spec.at("weight"), context.origin());
  if (const ParamSpec* bias = spec.find("bias")) bias_ = add(*bias, context.origin());
}

Norm::Norm(const ParallelContext& context, int64_t width, Normalization kind, double epsilon)
    : Norm(context, norm_params(width, kind, context.replicated_gradient_state()), kind, epsilon) {}

Norm::Norm(const LayerContext& context, const ModuleSpec& spec)
    : Norm(context, spec, context.config.normalization, context.config.layernorm_epsilon) {}

Norm::Norm(const LayerContext& context) : Norm(context, norm_params(context.settings())) {}

at::Tensor Norm::forward(const at::Tensor& input) const {
  check_normalized(input, weight_, label_);
  if (kind_ == Normalization::RMSNorm)
    return at::rms_norm(input, weight_.sizes(), weight_, epsilon_);
  return at::layer_norm(input, weight_.sizes(), weight_, bias_, epsilon_);
}

}  // namespace lockstep
