#include <algorithm>
#include <map>
#include <numeric>

#include "lockstep/core/check.h"
#include "lockstep/optimizer/expected_audit.h"
#include "lockstep/parallel_state/axis_groups.h"

namespace lockstep {
namespace {

/// The number of ranks along `kind`, `rank` among them.
int64_t ranks_along(const RankGrids& grids, GroupKind kind, int64_t rank) {
  return std::max<int64_t>(1, static_cast<int64_t>(grids.group_of(kind, rank).size()));
}

int64_t copies_of(const ParamDescription& description, const RankGrids& grids, int64_t rank) {
  int64_t copies = 1;
  for (const MeshAxis axis : kCuttingAxes)
    if (description.lives_on(axis) && description.placement(axis) == Placement(Replicate{}))
      copies *= ranks_along(grids, group_kind_of(axis), rank);
  if (description.tie)
    copies *= ranks_along(grids, tie_group_kind(description.tie->stages), rank);
  else if (description.is_on_all_stages())
    copies *= ranks_along(grids, GroupKind::pp, rank);
  return copies;
}

/// "every term", "1/2 of the terms", "none of the terms"
std::string share_text(size_t count, int64_t of, const char* all, const char* noun) {
  const ScalingFactor share = lowest_terms(static_cast<int64_t>(count), of);
  if (share == ScalingFactor{1, 1}) return all;
  if (count == 0) return fmt::format("none of the {}", noun);
  return fmt::format("{}/{} of the {}", share.numerator, share.denominator, noun);
}

/// The terms that a description asks for: their number, and the divisor of the sum of all of them.
struct AskedTerms {
  int64_t number, divisor;
};

AskedTerms asked_terms(const ParamDescription& description, const RankGrids& grids, int64_t rank,
                       GradientScalingMode mode) {
  AskedTerms asked = {ranks_along(grids, replicas(description), rank), 1};
  if (mode != GradientScalingMode::per_token) asked.divisor = grids.size(GroupKind::dp_cp);
  for (const MeshAxis axis : model_axes(description)) {
    const GradientState state = description.gradient_state(axis);
    if (state == GradientState::complete) continue;
    const int64_t ranks = ranks_along(grids, group_kind_of(axis), rank);
    asked.number *= ranks;
    if (state == GradientState::partial_mean) asked.divisor *= ranks;
  }
  if (description.tie)
    asked.number *= ranks_along(grids, tie_group_kind(description.tie->stages), rank);
  return asked;
}

}  // namespace

void set_effect(AuditedParameter& param, const ParamDescription& description,
                const RankGrids& grids, int64_t rank, const DistributedDataParallelConfig& ddp) {
  if (description.tie) param.tie = description.tie->name;
  param.copies = copies_of(description, grids, rank);
  param.replicas = ddp.use_distributed_optimizer ? grids.sizes().optimizer_instances
                                                 : ranks_along(grids, replicas(description), rank);
  if (param.first == param.last) return;
  const GradientScalingMode mode = scaling_mode(ddp);
  const AskedTerms asked = asked_terms(description, grids, rank, mode);
  for (const AuditTerms& terms : param.terms) {
    const ScalingFactor factor = lowest_terms(terms.numerator * asked.divisor, terms.denominator);
    param.effect += fmt::format(
        "{}{} x {}{}", param.effect.empty() ? "" : " + ",
        share_text(terms.ranks.size(), asked.number, "every term", "terms"), factor.numerator,
        factor.denominator == 1 ? "" : fmt::format("/{}", factor.denominator));
  }
  if (param.effect.empty()) param.effect = "none of the terms";
  param.effect +=
      mode == GradientScalingMode::per_token
          ? ", divided by " + share_text(param.token_ranks.size(), grids.size(GroupKind::dp_cp),
                                         "all tokens", "tokens")
          : ", averaged over the batch";
}

void set_elements(AuditReport& report) {
  const int64_t elements = trained_elements(report);
  for (AuditedRank& rank : report.ranks) rank.norm_elements = rank.zero_elements = elements;
}

std::string step_text(double factor, double norm, const OptimizerConfig& config) {
  const std::string text = fmt::format("gradients x {:g} / loss scale", factor);
  return config.clip_grad > 0 ? fmt::format("{}, norm at most {:g}", text, norm) : text;
}

std::string step_text(const OptimizerConfig& config) {
  return step_text(1, config.clip_grad, config);
}

void set_update_numbers(DescribedParameter& parameter, const OptimizerConfig& config) {
  const bool decoupled = parameter.description.is_embedding_or_output;
  parameter.max_lr = decoupled ? config.decoupled_lr.value_or(config.lr) : config.lr;
  parameter.min_lr = decoupled ? config.decoupled_min_lr.value_or(config.min_lr) : config.min_lr;
  parameter.wd_mult = parameter.description.apply_weight_decay ? 1 : 0;
}

std::string layout_text(const RankGrids& grids) {
  std::string text;
  const auto add_axis = [&](const char* name, int64_t size) {
    if (size > 1) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, size);
  };
  add_axis("tp", grids.sizes().tensor);
  add_axis("cp", grids.sizes().context);
  add_axis("dp", grids.data_parallel_size());
  add_axis("pp", grids.sizes().pipeline);
  add_axis("ep", grids.sizes().expert);
  if (grids.sizes().expert_tensor) add_axis("etp", grids.expert_tensor_size());
  add_axis("optimizer instances", grids.sizes().optimizer_instances);
  return text.empty() ? "one rank" : text;
}

std::string reduction_text(size_t number, size_t buckets, size_t parameters,
                           const std::string& operation, const std::string& group,
                           const std::string& instances) {
  return fmt::format("bucket {} of {}, {} parameter{}, {} over {}{}", number + 1, buckets,
                     parameters, parameters == 1 ? "" : "s", operation, group,
                     instances.empty() ? "" : ", all-reduce over " + instances);
}

std::string update_text(const UpdateStatement& statement, double max_lr, double min_lr,
                        double wd_mult, const std::string& step) {
  std::string states;
  for (const UpdateState& state : statement.state) states += " " + state.name;
  return fmt::format("{}, by {}, state{}, max_lr {:g}, min_lr {:g}, wd_mult {:g}, {}",
                     statement.name, to_string(statement.unit), states.empty() ? " none" : states,
                     max_lr, min_lr, wd_mult, step);
}

ScalingFactor lowest_terms(int64_t numerator, int64_t denominator) {
  const int64_t divisor = std::gcd(numerator, denominator);
  return {numerator / divisor, denominator / divisor};
}

std::vector<AuditTerms> grouped_terms(const std::vector<AuditTerms>& of_single_ranks) {
  std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>> by_factor;
  for (const AuditTerms& terms : of_single_ranks) {
    auto& ranks = by_factor[{terms.denominator, terms.numerator}];
    ranks.insert(ranks.end(), terms.ranks.begin(), terms.ranks.end());
  }
  std::vector<AuditTerms> grouped;
  for (auto& [factor, ranks] : by_factor) {
    std::sort(ranks.begin(), ranks.end());
    grouped.push_back({factor.second, factor.first, ranks});
  }
  return grouped;
}

void sort_parameters(AuditedRank& rank) {
  std::stable_sort(rank.parameters.begin(), rank.parameters.end(),
                   [](const AuditedParameter& a, const AuditedParameter& b) {
                     return std::pair(a.chunk, a.name) < std::pair(b.chunk, b.name);
                   });
}

}  // namespace lockstep
