#include "lockstep/testing/layout_check.h"

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/testing/faults.h"
#include "lockstep/testing/model_runs.h"
#include "lockstep/testing/param_pieces.h"

namespace lockstep::testing {
namespace {

constexpr double kWeightTolerance = 100;  // of options.tolerance

/// Keeps the largest value of all steps; NaN: none yet.
void note(double& most, double value) {
  if (std::isnan(most) || value > most) most = value;
}

/// The largest relative difference between a data-parallel group's loss and that in one process;
/// infinity for a loss that is NaN.
double loss_difference(const Comparison& comparison) {
  const double expected = comparison.whole().loss;
  double most = 0;
  for (int64_t rank = 0; rank < comparison.layout.ranks; ++rank) {
    const RankList stages = comparison.grids.group_of(GroupKind::pp, rank);
    if (stages[stages.size() - 1] != rank) continue;
    const RankList replicas = comparison.grids.group_of(GroupKind::dp_cp, rank);
    double total = 0;
    for (const int64_t member : replicas) total += comparison.of_rank(member).loss;
    if (!comparison.per_token) total /= static_cast<double>(replicas.size());
    const double off = std::abs(total - expected) / std::max(std::abs(expected), 1e-3);
    most = std::max(most, std::isnan(off) ? INFINITY : off);
  }
  return most;
}

std::optional<Finding> norm_fault(const Comparison& comparison, double& difference) {
  const double expected = comparison.whole().norm;
  double found = expected;
  difference = 0;
  for (int64_t rank = 0; rank < comparison.layout.ranks; ++rank) {
    const double norm = comparison.of_rank(rank).norm;
    double off = std::abs(norm - expected) / std::max(expected, 1e-300);
    if (std::isnan(off)) off = INFINITY;
    if (off > difference) {
      difference = off;
      found = norm;
    }
  }
  if (difference <= 10 * comparison.options.tolerance) return {};
  Finding finding = {.pass = "norm", .step = static_cast<int64_t>(comparison.step)};
  finding.text =
      fmt::format("the gradient norm is {:.17g}, in one process {:.17g}", found, expected);
  const double excess = found * found - expected * expected;
  const auto most = static_cast<double>(comparison.layout.ranks);
  for (const auto& [name, grad] : comparison.whole().local) {
    const double counted = excess / grad.square().sum().item<double>() + 1;
    const double whole = std::round(counted);
    if (whole == 1 || !(whole >= 0 && whole <= most && std::abs(counted - whole) <= 1e-6)) continue;
    finding.parameter = name;
    finding.factor = counted;
    finding.text = fmt::format(
        "`{}`: {}: it is counted {:.0f} times; ranks or stages that hold copies of it do not know "
        "of each other: see ParamDescription::placements, stages and tie",
        name, finding.text, counted);
    break;
  }
  return finding;
}

std::optional<Finding> weight_fault(const Comparison& comparison, double& difference) {
  std::optional<Finding> finding;
  double scale = 0;  // of finite weights: a frozen mask may hold infinity
  for (const auto& [name, weights] : comparison.whole().weights)
    scale = std::max(scale, largest(at::nan_to_num(weights, 0.0, 0.0, 0.0)));
  difference = 0;
  for (int64_t rank = 0; rank < comparison.layout.ranks; ++rank)
    for (const NamedParameter& param : comparison.ranks[static_cast<size_t>(rank)].params) {
      const at::Tensor expected =
          comparison.piece(rank, param, comparison.whole().weights.at(param.name));
      const at::Tensor& found = comparison.of_rank(rank).weights.at(param.name);
      const bool spoilt =
          at::isfinite(expected).logical_and(at::isfinite(found).logical_not()).any().item<bool>();
      const double off = spoilt ? INFINITY : largest(found - expected) / scale;
      difference = std::max(difference, off);
      if (finding || off <= kWeightTolerance * comparison.options.tolerance) continue;
      finding = Finding{.pass = "update",
                        .parameter = param.name,
                        .step = static_cast<int64_t>(comparison.step),
                        .text = fmt::format("`{}`: its gradient is right, and after the update its "
                                            "weights differ on rank {}: the update depends on the "
                                            "layout, as that of a whole matrix does with "
                                            "UpdateUnit::range, or settings differ between ranks",
                                            param.name, rank)};
    }
  return finding;
}

/// The finding for a step whose gradients were not made final.
Finding not_final(const Comparison& comparison, const std::string& message) {
  double ignored = 0;
  std::string name;
  if (const auto fault = gradient_fault(comparison, ignored)) name = fault->parameter;
  for (const NamedParameter& param : comparison.reference.params)
    if (name.empty() && param.tensor.requires_grad() &&
        (param.description.tie || !partial_axes(param.description, comparison.grids).empty() ||
         comparison.per_token))
      name = param.name;
  return {.pass = "finalize",
          .parameter = name,
          .step = static_cast<int64_t>(comparison.step),
          .text = fmt::format("`{}`: its gradient is not final: finalize_model_grads() was not "
                              "called between backward and the update ({})",
                              name, message)};
}

std::optional<Finding> compare_step(const Comparison& comparison, LayoutResult& result) {
  note(result.loss, loss_difference(comparison));
  if (auto fault = forward_fault(comparison)) return fault;
  const RunRecord& run = comparison.ranks.front();
  const bool is_last = comparison.step + 1 == run.steps.size();  // all others were final
  if (is_last && !run.not_final.empty()) return not_final(comparison, run.not_final);
  double difference = 0;
  auto fault = gradient_fault(comparison, difference);
  note(result.gradients, difference);
  if (fault) return fault;
  fault = norm_fault(comparison, difference);
  note(result.norm, difference);
  if (fault) return fault;
  fault = weight_fault(comparison, difference);
  note(result.weights, difference);
  return fault;
}

LayoutResult check_layout(const CheckedModel& model, const RankLayout& layout,
                          const RunRecord& reference) {
  LayoutResult result = {.layout = layout};
  const LayoutRun run = run_on_ranks(model, layout, reference);
  if (run.finding) {
    result.culprit = run.finding;
    return result;
  }
  for (size_t step = 0; step < run.ranks.front().steps.size() && !result.culprit; ++step)
    result.culprit = compare_step(
        {reference, run.ranks, layout, model.options, model.per_token(), layout.grids(), step},
        result);
  return result;
}

}  // namespace

bool LayoutReport::ok() const {
  return std::none_of(layouts.begin(), layouts.end(),
                      [](const LayoutResult& result) { return result.culprit.has_value(); });
}

std::string to_string(const LayoutResult& result) {
  const std::string layout = to_string(result.layout);
  if (!result.culprit)
    return fmt::format("{}: equal (loss {:.1e}, gradients {:.1e}, norm {:.1e}, weights {:.1e})",
                       layout, result.loss, result.gradients, result.norm, result.weights);
  const Finding& culprit = *result.culprit;
  return fmt::format("{}: {}, step {}: {}", layout, culprit.pass, culprit.step + 1, culprit.text);
}

std::string to_string(const LayoutReport& report) {
  std::string text;
  for (const LayoutResult& result : report.layouts) text += to_string(result) + "\n";
  return text;
}

LayoutReport check_layouts(const MakeModule& make_model, const StageLoss& loss,
                           const std::vector<RankLayout>& layouts, const CheckOptions& options) {
  require<ConfigError>(options.steps >= 1 && options.microbatches >= 1,
                       "check_layouts: found {} steps of {} micro-batches, allowed: >= 1",
                       options.steps, options.microbatches);
  for (const RankLayout& layout : layouts) layout.grids();
  const CheckedModel model = {make_model, loss, options};
  const RunRecord reference = run_in_one_process(model);
  LayoutReport report;
  for (const RankLayout& layout : layouts)
    report.layouts.push_back(check_layout(model, layout, reference));
  return report;
}

}  // namespace lockstep::testing
