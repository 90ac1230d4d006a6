#include <algorithm>
#include <map>
#include <numeric>

#include "lockstep/core/check.h"
#include "lockstep/optimizer/expected_audit.h"

namespace lockstep {

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
                        double wd_mult) {
  std::string states;
  for (const UpdateState& state : statement.state) states += " " + state.name;
  return fmt::format("{}, by {}, state{}, max_lr {:g}, min_lr {:g}, wd_mult {:g}", statement.name,
                     to_string(statement.unit), states.empty() ? " none" : states, max_lr, min_lr,
                     wd_mult);
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
