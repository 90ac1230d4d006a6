#include "lockstep/optimizer/audit.h"
#include "lockstep/training/trainer.h"

namespace lockstep {

AuditReport Trainer::audit() {
  settle();
  model_->finish_param_sync();
  return lockstep::audit({.models = model_->wrappers(),
                          .ddp = config_.ddp,
                          .optimizer = optimizer_.get(),
                          .config = config_.optimizer});
}

}  // namespace lockstep
