#include "lockstep/optimizer/audited_loop.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/optimizer/audited_model.h"
#include "lockstep/optimizer/expected_audit.h"
#include "lockstep/optimizer/marked_steps.h"

namespace lockstep {
namespace {

bool is_mean(const AuditedLoop& loop) { return loop.reduction == GradientReduction::mean; }

std::vector<const NamedParameter*> trained_of(const AuditedLoop& loop) {
  std::vector<const NamedParameter*> trained;
  for (const NamedParameter& param : loop.parameters)
    if (param.tensor.requires_grad()) trained.push_back(&param);
  return trained;
}

class LoopAudit {
 public:
  explicit LoopAudit(const AuditedLoop& loop)
      : loop_(loop),
        trained_(trained_of(loop)),
        marked_{.state = *loop.state,
                .divides_by_tokens = loop.reduction == GradientReduction::per_token,
                .averaged_ranks = is_mean(loop) ? loop.state->grids().size(GroupKind::dp_cp) : 1,
                .gradients = {},
                .step = [this](const MarkerOf& marker, double tokens) { step(marker, tokens); }} {
    for (const NamedParameter* const param : trained_) {
      const auto bytes = static_cast<int64_t>(param->tensor.element_size());
      marked_.gradients.push_back({param, std::min(bytes, loop.bytes_sent.value_or(bytes)),
                                   [param] { return param->tensor.grad(); }});
    }
  }

  AuditedRank run() {
    const std::vector<MarkerReading> readings = read_markers(marked_);
    AuditedRank rank = {.rank = loop_.state->rank()};
    for (size_t i = 0; i < trained_.size(); ++i)
      rank.parameters.push_back(entry(*trained_[i], readings[i]));
    if (loop_.norm) rank.norm_elements = elements_in_norm(marked_, loop_.norm);
    fill_held(marked_, 0);
    return rank;
  }

 private:
  /// Puts half of the markers into the first micro-batch, half into the last.
  at::Tensor loss(int64_t microbatch, const MarkerOf& marker) const {
    const int64_t last = loop_.num_microbatches - 1;
    double share = last == 0 ? 1 : microbatch == 0 || microbatch == last ? 0.5 : 0;
    if (is_mean(loop_)) share *= static_cast<double>(loop_.num_microbatches);
    at::Tensor sum = at::zeros({}, at::TensorOptions(loop_.state->device()).dtype(at::kDouble));
    for (size_t i = 0; i < trained_.size(); ++i)
      sum = sum + (trained_[i]->tensor * (marker(i) * share)).sum().to(at::kDouble);
    return sum;
  }

  void step(const MarkerOf& marker, double tokens) const {
    std::optional<at::Tensor> num_tokens;
    if (marked_.divides_by_tokens) num_tokens = at::full({}, tokens, at::kDouble);
    loop_.step([&](int64_t microbatch) { return loss(microbatch, marker); }, num_tokens);
  }

  AuditedParameter entry(const NamedParameter& param, const MarkerReading& reading) const {
    AuditedParameter audited = {.name = param.name,
                                .shape = param.tensor.sizes().vec(),
                                .description = param.description.to_string(),
                                .last = param.tensor.numel(),
                                .terms = grouped_terms(reading.terms),
                                .token_ranks = reading.token_ranks,
                                .problem = reading.problem};
    DistributedDataParallelConfig ddp;
    ddp.calculate_per_token_loss = !is_mean(loop_);
    set_effect(audited, param.description, loop_.state->grids(), loop_.state->rank(), ddp);
    return audited;
  }

  const AuditedLoop& loop_;
  std::vector<const NamedParameter*> trained_;
  MarkedLoop marked_;
};

}  // namespace

void check_audited_loop(const AuditedLoop& loop, const char* call) {
  require<UsageError>(loop.state != nullptr, "{}: state: missing", call);
  require<UsageError>(static_cast<bool>(loop.step), "{}: step: missing", call);
  require<UsageError>(loop.num_microbatches >= 1, "{}: num_microbatches: found {}, allowed: >= 1",
                      call, loop.num_microbatches);
  require<UsageError>(!trained_of(loop).empty(), "{}: parameters: found none that is trained",
                      call);
}

AuditReport audit(const AuditedLoop& loop) {
  check_audited_loop(loop, "audit");
  AuditedRank own = LoopAudit(loop).run();
  sort_parameters(own);
  return report_of_all_ranks(*loop.state, to_string(loop.reduction), own);
}

}  // namespace lockstep
