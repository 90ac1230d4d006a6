#include "lockstep/optimizer/audit.h"
#include "lockstep/training/trainer.h"

namespace lockstep {

AuditReport Trainer::audit() {
  settle();
  model_->finish_param_sync();
  const int64_t microbatches = batches_.at(consumed_samples_).num_microbatches;
  AuditReport report =
      lockstep::audit({.models = model_->wrappers(),
                       .ddp = config_.ddp,
                       .optimizer = optimizer_.get(),
                       .config = config_.optimizer,
                       .num_microbatches = microbatches,
                       .loss = [&](const at::Tensor& losses) {
                         return model_->loss_of_microbatch(losses, microbatches, 1);
                       }});
  model_->forget_fp8_values();
  return report;
}

}  // namespace lockstep
