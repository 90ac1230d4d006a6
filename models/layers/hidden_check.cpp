#include "lockstep/models/hidden_check.h"

#include "lockstep/models/input_check.h"

namespace lockstep {

HiddenCheck::HiddenCheck(const LayerContext& context, const char* kind)
    : label_(context.name.empty() ? kind : ParallelContext(context).label()),
      width_(context.config.hidden_size),
      dtype_(c10::typeMetaToScalarType(context.options.dtype())) {}

void HiddenCheck::operator()(const at::Tensor& hidden) const {
  const bool fits = hidden.defined() && hidden.dim() == 3 && hidden.size(2) == width_ &&
                    hidden.scalar_type() == dtype_;
  if (!fits) [[unlikely]]
    refuse_input(hidden, "sequence, batch", width_, dtype_, label_);
}

}  // namespace lockstep
