#include "lockstep/optimizer/audit.h"

#include <algorithm>
#include <cmath>
#include <map>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/text_digest.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/audited_model.h"
#include "lockstep/optimizer/counted_grads.h"
#include "lockstep/optimizer/expected_audit.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/rank_program.h"

namespace lockstep {
namespace {

constexpr const char* kAuditLabel = "audit";
/// Factors are multiples of 1 / 48.
constexpr int64_t kResolution = 48;
/// Between the markers of two ranks that share a round.
constexpr double kSlot = 1 << 14;
/// How far from an integer a marker may be: rounding of 16 bits, and in the slots of a round those
/// below.
constexpr double kRounding = 0.3;

/// Where one parameter's gradient lies.
struct Place {
  size_t model;
  const ParamAndGradBuffer* buffer;
  size_t index;
  ElementRange owned;  ///< of the buffer

  const NamedParameter& param() const { return buffer->params()[index]; }
  /// Of an element of the parameter or of its gradient, whichever has fewer.
  int64_t bytes() const {
    const auto grad = static_cast<int64_t>(buffer->grad_data().element_size());
    return std::min(grad, static_cast<int64_t>(param().tensor.element_size()));
  }
};

/// The range of the parameter that lies in what this rank owns.
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

/// Tells parameters apart; copies of one have the same. In 16 bits there is no room for it.
double number_of(const Place& place) {
  if (place.bytes() < 4) return 1;
  const auto& tie = place.param().description.tie;
  return static_cast<double>(1 + 2 * (text_digest(tie ? tie->name : place.param().name) % 6));
}

/// What is read from one gradient.
struct Reading {
  std::vector<AuditTerms> terms = {};
  std::vector<int64_t> token_ranks = {};
  std::string problem = {};
};

class Measurement {
 public:
  explicit Measurement(const AuditedModel& model)
      : model_(model),
        state_(model.models.front()->parallel_state()),
        places_(places_of(model.models)),
        per_token_(model.models.front()->scaling_mode() == GradientScalingMode::per_token),
        batch_ranks_(per_token_ ? 1 : state_.grids().size(GroupKind::dp_cp)),
        readings_(places_.size()) {
    const int64_t bytes = fewest_bytes();
    slots_ = bytes == 8 ? (per_token_ ? 4 : 3) : bytes == 4 && per_token_ ? 2 : 1;
    token_ranks_ = bytes == 8 ? 40 : bytes == 4 ? 16 : 4;
  }

  AuditedRank run() {
    for (int64_t first = 0; first < state_.world_size(); first += slots_) measure_terms(first);
    for (int64_t first = 0; per_token_ && first < state_.world_size(); first += token_ranks_)
      measure_tokens(first);
    AuditedRank rank = {.rank = state_.rank()};
    const std::vector<bool> counted = counted_places();
    const std::vector<std::string> reductions = reductions_of_places();
    const std::vector<std::string> updates = updates_of_places();
    for (size_t i = 0; i < places_.size(); ++i) {
      AuditedParameter& param = rank.parameters.emplace_back(entry(places_[i], readings_[i]));
      param.reduction = reductions[i];
      param.counted = counted[i];
      param.update = updates[i];
    }
    for (DistributedDataParallel* const model : model_.models) model->zero_grad();
    return rank;
  }

 private:
  /// Of all places on all ranks.
  int64_t fewest_bytes() const {
    int64_t fewest = 8;
    for (const Place& place : places_) fewest = std::min(fewest, place.bytes());
    const at::Tensor all =
        at::full({}, fewest, at::TensorOptions(state_.device()).dtype(at::kLong));
    all_reduce(state_.world(), all, ReduceOp::min, kAuditLabel).wait();
    return all.item<int64_t>();
  }

  /// A step whose backward leaves `value(place)` in each element of each parameter.
  template <class Value>
  void reduce(Value value, double tokens) {
    for (size_t m = 0; m < model_.models.size(); ++m) {
      DistributedDataParallel& ddp = *model_.models[m];
      ddp.zero_grad();
      const auto unsynchronized = ddp.no_sync();
      at::Tensor loss = at::zeros({}, at::TensorOptions(state_.device()).dtype(at::kDouble));
      for (const Place& place : places_)
        if (place.model == m)
          loss = loss + (place.param().tensor * value(place)).sum().to(at::kDouble);
      loss.backward();
    }
    for (DistributedDataParallel* const model : model_.models) model->start_grad_sync();
    std::optional<at::Tensor> num_tokens;
    if (per_token_) num_tokens = at::full({}, tokens, at::kDouble);
    if (model_.finalize)
      model_.finalize(num_tokens);
    else
      finalize_model_grads(model_.models, num_tokens);
  }

  /// The number that all elements of a gradient have which this rank owns; notes where they have
  /// several.
  std::optional<double> held(size_t number) {
    const Place& place = places_[number];
    Reading& reading = readings_[number];
    if (place.owned.numel() == 0 || !reading.problem.empty()) return {};
    const at::Tensor all = place.buffer->held_grads(place.owned).to(at::kDouble);
    const double least = all.min().item<double>(), most = all.max().item<double>();
    const double rounding = place.bytes() == 8 ? 1e-9 : place.bytes() == 4 ? 1e-6 : 1e-2;
    if (std::isfinite(most) && most - least <= rounding * std::abs(most)) return most;
    reading.problem =
        fmt::format("different terms in its elements: markers from {:g} to {:g}", least, most);
    return {};
  }

  /// Without tokens, so that nothing is divided by them.
  void measure_terms(int64_t first) {
    const int64_t slot = state_.rank() - first;
    reduce(
        [&](const Place& place) {
          if (slot < 0 || slot >= slots_) return 0.0;
          return number_of(place) * static_cast<double>(kResolution * batch_ranks_) *
                 std::pow(kSlot, static_cast<double>(slot));
        },
        /*tokens=*/0);
    for (size_t i = 0; i < places_.size(); ++i) {
      if (const auto found = held(i)) read_terms(i, first, *found);
      if (!readings_[i].problem.empty()) readings_[i].terms.clear();
    }
  }

  /// From the slot of the highest rank down.
  void read_terms(size_t number, int64_t first, double rest) {
    Reading& reading = readings_[number];
    for (int64_t slot = slots_ - 1; slot >= 0; --slot) {
      const double unit = number_of(places_[number]) * std::pow(kSlot, static_cast<double>(slot));
      const double parts = std::round(rest / unit);
      if (std::abs(rest / unit - parts) > kRounding) {
        reading.problem =
            fmt::format("the term of rank {} is no multiple of 1/{} of its gradient: {:g} times it",
                        first + slot, kResolution * batch_ranks_,
                        rest / unit / static_cast<double>(kResolution * batch_ranks_));
        return;
      }
      rest -= parts * unit;
      if (parts == 0) continue;
      const ScalingFactor factor =
          lowest_terms(static_cast<int64_t>(parts), kResolution * batch_ranks_);
      reading.terms.push_back({factor.numerator, factor.denominator, {first + slot}});
    }
  }

  /// Each rank's tokens are a power of two of its own.
  void measure_tokens(int64_t first) {
    const int64_t own = state_.rank() - first;
    const bool takes_part = own >= 0 && own < token_ranks_;
    reduce([](const Place&) { return static_cast<double>(kResolution); },
           takes_part ? std::pow(2.0, static_cast<double>(own + 1)) : 0);
    for (size_t i = 0; i < places_.size(); ++i) {
      if (const auto found = held(i)) read_tokens(i, first, *found);
      if (!readings_[i].problem.empty()) readings_[i].token_ranks.clear();
    }
  }

  void read_tokens(size_t number, int64_t first, double found) {
    Reading& reading = readings_[number];
    double undivided = 0;
    for (const AuditTerms& terms : reading.terms)
      undivided += static_cast<double>(kResolution * terms.numerator) /
                   static_cast<double>(terms.denominator);
    const double divisor = undivided / found;
    const double sum = std::round(divisor);
    if (undivided == 0 || !(std::abs(divisor - sum) < kRounding)) {
      reading.problem =
          fmt::format("the divisor is no sum of the ranks' tokens: a marker of {:g} became {:g}",
                      undivided, found);
      return;
    }
    for (int64_t i = 0; i < token_ranks_; ++i)
      if ((static_cast<int64_t>(sum) >> (i + 1)) & 1) reading.token_ranks.push_back(first + i);
  }

  /// Whether the norm goes through what this rank owns of each parameter.
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
      const at::Tensor held = place.buffer->held_grads(place.owned);
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

  static AuditedParameter entry(const Place& place, const Reading& reading) {
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
    return audited;
  }

  /// By the optimizer's own groups, and by the states that it keeps of each parameter.
  std::vector<std::string> updates_of_places() const {
    std::vector<std::string> updates(places_.size());
    if (!model_.optimizer) return updates;
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
      updates[i] = update_text(statement, group.max_lr, group.min_lr, group.wd_mult);
    }
    return updates;
  }

  const AuditedModel& model_;
  const ParallelState& state_;
  std::vector<Place> places_;
  bool per_token_;
  int64_t batch_ranks_;      ///< by which gradients are averaged
  int64_t slots_ = 1;        ///< ranks whose markers share a round
  int64_t token_ranks_ = 1;  ///< ranks whose tokens share a round
  std::vector<Reading> readings_;
};

}  // namespace

AuditReport audit(const AuditedModel& model) {
  check_audited_model(model, kAuditLabel);
  AuditedRank own = Measurement(model).run();
  sort_parameters(own);
  return report_of_all_ranks(model, own);
}

}  // namespace lockstep
