#include "lockstep/optimizer/update_rule.h"

namespace lockstep {

MatrixLayout matrix_layout(const OptimizerConfig& config) {
  return config.optimizer == OptimizerKind::muon ? MatrixLayout::whole : MatrixLayout::cut;
}

UpdateRule rule_of(OptimizerKind kind, bool whole_matrices) {
  if (kind == OptimizerKind::sgd) return UpdateRule::sgd;
  return kind == OptimizerKind::muon && whole_matrices ? UpdateRule::muon : UpdateRule::adam;
}

int64_t state_bytes_of_element(const OptimizerConfig& config, UpdateRule rule,
                               int64_t param_bytes) {
  const int64_t master = param_bytes == 2 ? 4 : 0;
  const int64_t wide = param_bytes == 2 ? 4 : param_bytes;
  if (rule == UpdateRule::muon) return master + wide;
  if (rule == UpdateRule::sgd) return master + (config.sgd_momentum > 0 ? wide : 0);
  const auto moment = [&](StateDtype dtype) { return dtype == StateDtype::bf16 ? 2 : wide; };
  return master + moment(config.exp_avg_dtype) + moment(config.exp_avg_sq_dtype);
}

}  // namespace lockstep
