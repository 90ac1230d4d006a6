#include "lockstep/optimizer/audit.h"

#include <algorithm>
#include <cmath>
#include <map>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/audited_model.h"
#include "lockstep/optimizer/clip_grads.h"
#include "lockstep/optimizer/counted_grads.h"
#include "lockstep/optimizer/expected_audit.h"
#include "lockstep/optimizer/marked_steps.h"
#include "lockstep/optimizer/step_control.h"
#include "lockstep/parallel_state/rank_program.h"

namespace lockstep {
namespace {

constexpr const char* kAuditLabel = "audit";

/// The place of one parameter's gradient.
struct Place {
  size_t model;
  const ParamAndGradBuffer* buffer;
  size_t index;
  ElementRange owned;  ///< of the buffer

  const NamedParameter& param() const { return buffer->params()[index]; }
  at::Tensor held() const {
    return owned.numel() == 0 ? at::empty({0}, buffer->grad_data().options())
                              : buffer->held_grads(owned);
  }
  /// The bytes of an element of the parameter or of its gradient, whichever has fewer.
  int64_t bytes() const {
    const auto grad = static_cast<int64_t>(buffer->grad_data().element_size());
    return std::min(grad, static_cast<int64_t>(param().tensor.element_size()));
  }
};

/// The range of the parameter that this rank owns.
ElementRange owned_range(const ParamAndGradBuffer& buffer, size_t index) {
  const ParamLayout::Slot& slot = buffer.layout().slots[index];
  for (const ElementRange& range : buffer.owned()) {
    const ElementRange both = {std::max(range.start, slot.start), std::min(range.end, slot.end)};
    if (both.start < both.end) return both;
  }
  return {slot.start, slot.start};
}

std::vector<Place> places_of(const std::vector<DistributedDataParallel*>& models) {
  std::vector<Place> places;
  for (size_t m = 0; m < models.size(); ++m)
    for (const ParamAndGradBuffer* buffer : models[m]->buffers())
      for (size_t i = 0; i < buffer->params().size(); ++i)
        places.push_back({m, buffer, i, owned_range(*buffer, i)});
  return places;
}

/// Measures the factor of small gradients and the norm of large ones. The loss scale is a value of
/// its own, so that a scale that is left in shows; host and device must agree.
std::string measured_step_text(const OptimizerConfig& config) {
  constexpr double kLossScale = 8;
  OptimizerConfig of_audit = config;
  of_audit.grad_norm_skip_threshold.reset();
  const double small = config.clip_grad / 1024, large = std::max(1e6, 1024 * config.clip_grad);
  const auto text_of = [&](auto number) {
    const auto factor = [&](double norm) {
      return step_control(number(norm), of_audit, kLossScale).cpu().template data_ptr<double>()[0] *
             kLossScale;
    };
    return step_text(factor(small), factor(large) * large, config);
  };
  const std::string on_host = text_of([](double norm) { return norm; });
  const std::string on_device =
      text_of([](double norm) { return at::full({}, norm, at::kDouble); });
  return on_host == on_device ? on_host
                              : fmt::format("{} on the host, {} on a device", on_host, on_device);
}

class ModelAudit {
 public:
  explicit ModelAudit(const AuditedModel& model)
      : model_(model),
        state_(model.models.front()->parallel_state()),
        places_(places_of(model.models)),
        per_token_(model.models.front()->scaling_mode() == GradientScalingMode::per_token),
        loop_{.state = state_,
              .divides_by_tokens = per_token_,
              .averaged_ranks = per_token_ ? 1 : state_.grids().size(GroupKind::dp_cp),
              .gradients = {},
              .step = [this](const MarkerOf& marker, double tokens) { step(marker, tokens); }} {
    for (const Place& place : places_)
      loop_.gradients.push_back({&place.param(), place.bytes(), [&place] { return place.held(); }});
    for (DistributedDataParallel* const wrapper : model_.models)
      if (model_.num_microbatches > 0) wrapper->set_num_microbatches(model_.num_microbatches);
  }

  AuditedRank run() {
    std::vector<MarkerReading> readings = read_markers(loop_);
    if (model_.num_microbatches > 0) {
      flushes_ = true;
      check_readings(loop_, readings, "reduced by start_grad_sync()");
    }
    AuditedRank rank = {.rank = state_.rank()};
    const std::vector<bool> counted = counted_places();
    const std::vector<std::string> reductions = reductions_of_places();
    const std::vector<std::string> updates = updates_of_places();
    for (size_t i = 0; i < places_.size(); ++i) {
      AuditedParameter& param = rank.parameters.emplace_back(entry(places_[i], readings[i]));
      param.reduction = reductions[i];
      param.counted = counted[i];
      param.update = updates[i];
    }
    rank.norm_elements = elements_in_norm(loop_, [&] { return grad_norm(model_.models); });
    fill_held(loop_, 0);
    rank.zero_elements = zeros_and_padding();
    for (DistributedDataParallel* const wrapper : model_.models) wrapper->zero_grad();
    return rank;
  }

 private:
  /// Runs backward of a micro-batch whose gradients are `share` of the markers.
  void backward(size_t model, const MarkerOf& marker, double share) {
    at::Tensor sum = at::zeros({}, at::TensorOptions(state_.device()).dtype(at::kDouble));
    for (size_t i = 0; i < places_.size(); ++i)
      if (places_[i].model == model)
        sum = sum + (places_[i].param().tensor * (marker(i) * share)).sum().to(at::kDouble);
    const at::Tensor losses = sum.view({1, 1});
    const auto batches = static_cast<double>(std::max<int64_t>(1, model_.num_microbatches));
    const at::Tensor of_batch = per_token_ ? losses : losses * batches;  // its mean is averaged
    if (model_.loss)
      model_.loss(of_batch).backward();
    else
      (per_token_ ? of_batch.sum() : of_batch.mean() / batches).backward();
  }

  /// Puts half of the markers into the first micro-batch, half into the last.
  void step(const MarkerOf& marker, double tokens) {
    const int64_t last = model_.num_microbatches - 1;
    for (size_t m = 0; m < model_.models.size(); ++m) {
      DistributedDataParallel& ddp = *model_.models[m];
      ddp.zero_grad();
      if (flushes_ || last < 0) {
        const auto unsynchronized = ddp.no_sync();
        backward(m, marker, 1);
        continue;
      }
      for (int64_t batch = 0; batch <= last; ++batch)
        backward(m, marker, last == 0 ? 1 : batch == 0 || batch == last ? 0.5 : 0);
    }
    for (DistributedDataParallel* const wrapper : model_.models)
      if (flushes_ || last < 0) wrapper->start_grad_sync();
    std::optional<at::Tensor> num_tokens;
    if (per_token_) num_tokens = at::full({}, tokens, at::kDouble);
    if (model_.finalize)
      model_.finalize(num_tokens);
    else
      finalize_model_grads(model_.models, num_tokens);
  }

  /// What the count of zeros counts, and the rows of padding that it leaves out.
  int64_t zeros_and_padding() const {
    const auto zeros = [&](Gaps gaps) {
      return count_zeros(CountedRanges(model_.models, gaps, kAuditLabel));
    };
    const at::Tensor padding = zeros(Gaps::excluded) - zeros(Gaps::excluded_with_padding);
    return (count_zeros(model_.models) + padding).item<int64_t>();
  }

  /// Whether the norm covers what this rank owns of each parameter.
  std::vector<bool> counted_places() const {
    std::vector<std::pair<const char*, const char*>> pieces;
    for (const auto& of_class :
         CountedRanges(model_.models, Gaps::excluded, kAuditLabel).grads(kAuditLabel))
      for (const at::Tensor& piece : of_class) {
        const auto* const begin = static_cast<const char*>(piece.const_data_ptr());
        pieces.emplace_back(begin, begin + piece.nbytes());
      }
    std::vector<bool> counted;
    for (const Place& place : places_) {
      counted.push_back(false);
      if (place.owned.numel() == 0) continue;
      const at::Tensor held = place.held();
      const auto* const begin = static_cast<const char*>(held.const_data_ptr());
      counted.back() = std::any_of(pieces.begin(), pieces.end(), [&](const auto& piece) {
        return begin >= piece.first && begin < piece.second;
      });
    }
    return counted;
  }

  std::vector<std::string> reductions_of_places() const {
    const auto text_of = [](const ProcessGroup& group) {
      return group_text(group.name(), group.ranks());
    };
    std::vector<std::map<std::string, std::string>> of_models;
    for (const DistributedDataParallel* const model : model_.models) {
      auto& texts = of_models.emplace_back();
      const std::vector<BucketInfo> buckets = model->buckets();
      for (size_t b = 0; b < buckets.size(); ++b)
        for (const std::string& name : buckets[b].parameters)
          texts[name] = reduction_text(b, buckets.size(), buckets[b].parameters.size(),
                                       to_string(buckets[b].operation), text_of(buckets[b].group),
                                       buckets[b].instances ? text_of(*buckets[b].instances) : "");
    }
    std::vector<std::string> reductions;
    for (const Place& place : places_)
      reductions.push_back(of_models[place.model][place.param().name]);
    return reductions;
  }

  AuditedParameter entry(const Place& place, const MarkerReading& reading) const {
    const NamedParameter& param = place.param();
    const int64_t start = place.buffer->layout().slots[place.index].start;
    AuditedParameter audited = {.name = param.name,
                                .chunk = static_cast<int64_t>(place.model),
                                .shape = param.tensor.sizes().vec(),
                                .description = param.description.to_string()};
    if (place.owned.numel() > 0) {
      audited.first = place.owned.start - start;
      audited.last = place.owned.end - start;
    }
    audited.terms = grouped_terms(reading.terms);
    audited.token_ranks = reading.token_ranks;
    audited.problem = reading.problem;
    DistributedDataParallelConfig ddp;
    ddp.use_distributed_optimizer = model_.models.front()->is_sharded();
    ddp.calculate_per_token_loss = per_token_;
    set_effect(audited, param.description, state_.grids(), state_.rank(), ddp);
    return audited;
  }

  /// The updates by the optimizer's own groups, and by the states that it keeps for each parameter.
  std::vector<std::string> updates_of_places() const {
    std::vector<std::string> updates(places_.size());
    if (!model_.optimizer) return updates;
    const std::string step = measured_step_text(model_.config);
    std::map<std::string, std::vector<std::string>> kept;
    for (const StateSlice& slice : model_.optimizer->state_slices()) {
      std::vector<std::string>& names = kept[slice.parameter];
      names.clear();
      for (const StateSlice::Values& values : slice.values)
        if (values.name != "master") names.push_back(values.name);
    }
    const std::vector<size_t>& group_of = model_.optimizer->group_of_params();
    for (size_t i = 0; i < places_.size(); ++i) {
      UpdateStatement statement = update_statement(
          model_.config, places_[i].buffer->holds_whole_matrices(), model_.own_rule);
      const auto found = kept.find(places_[i].param().name);
      if (found != kept.end()) {
        statement.state.clear();
        for (const std::string& name : found->second) statement.state.push_back({.name = name});
      }
      const ParamGroup& group = model_.optimizer->param_groups()[group_of[i]];
      updates[i] = update_text(statement, group.max_lr, group.min_lr, group.wd_mult, step);
    }
    return updates;
  }

  const AuditedModel& model_;
  const ParallelState& state_;
  std::vector<Place> places_;
  bool per_token_;
  bool flushes_ = false;  ///< buckets are launched by start_grad_sync(), not by hooks
  MarkedLoop loop_;
};

}  // namespace

AuditReport audit(const AuditedModel& model) {
  check_audited_model(model, kAuditLabel);
  AuditedRank own = ModelAudit(model).run();
  sort_parameters(own);
  const DistributedDataParallel& first = *model.models.front();
  return report_of_all_ranks(first.parallel_state(), to_string(first.scaling_mode()), own);
}

}  // namespace lockstep
