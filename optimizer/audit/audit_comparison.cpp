#include "lockstep/optimizer/audit_comparison.h"

#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "lockstep/core/check.h"
#include "lockstep/core/counted.h"

namespace lockstep {
namespace {

/// The texts of ranks about a parameter, each with the ranks that have it.
using Texts = std::map<std::string, std::set<int64_t>>;

/// One parameter of the model, on all ranks.
struct WholeParameter {
  Texts gradients, updates, shapes, descriptions, reductions, terms, tokens;
  std::set<int64_t> ranks;
  std::string padding;  ///< "257 rows before padding"; empty: not padded
  int64_t held = 0, counted = 0, copies = 1, replicas = 1;
};

using Whole = std::map<std::string, WholeParameter>;

/// The text that all ranks have, or each text and its ranks.
std::string text_of(const Texts& texts) {
  if (texts.size() == 1) return texts.begin()->first;
  std::string all;
  for (const auto& [text, ranks] : texts)
    all += fmt::format("{}{} on ranks [{}]", all.empty() ? "" : "; ", text, fmt::join(ranks, ", "));
  return all.empty() ? "none" : all;
}

std::string fraction_text(int64_t numerator, int64_t denominator) {
  const int64_t divisor = std::max<int64_t>(1, std::gcd(numerator, denominator));
  if (denominator == divisor) return fmt::to_string(numerator / divisor);
  return fmt::format("{}/{}", numerator / divisor, denominator / divisor);
}

std::string elements_text(const WholeParameter& whole) {
  return fraction_text(whole.held, whole.copies * whole.replicas);
}

std::string norm_text(const WholeParameter& whole) {
  if (whole.held == 0) return "counts no element";
  return fmt::format("counts each element {} x",
                     fraction_text(whole.counted * whole.copies, whole.held));
}

std::string padding_of(const std::string& description) {
  const size_t end = description.find(" rows before padding");
  if (end == std::string::npos) return "";
  const size_t begin = description.rfind(", ", end);
  return description.substr(begin + 2, end - begin - 2) + " rows before padding";
}

std::string terms_of(const AuditedParameter& param) {
  std::string text;
  for (const AuditTerms& terms : param.terms)
    text += fmt::format("{}{} x ranks [{}]", text.empty() ? "" : " + ",
                        fraction_text(terms.numerator, terms.denominator),
                        fmt::join(terms.ranks, ", "));
  return text;
}

void add(WholeParameter& whole, int64_t rank, const AuditedParameter& param, bool first_copy) {
  whole.ranks.insert(rank);
  whole.updates[param.update].insert(rank);
  whole.shapes[fmt::format("[{}]", fmt::join(param.shape, ", "))].insert(rank);
  whole.descriptions[param.description].insert(rank);
  whole.reductions[param.reduction].insert(rank);
  whole.padding = padding_of(param.description);
  whole.copies = param.copies;
  whole.replicas = param.replicas;
  const int64_t elements = param.last - param.first;
  if (first_copy) whole.held += elements;
  if (param.counted) whole.counted += elements;
  if (elements == 0) return;
  whole.gradients[param.problem.empty() ? param.effect : param.problem].insert(rank);
  whole.terms[terms_of(param)].insert(rank);
  whole.tokens[fmt::format("[{}]", fmt::join(param.token_ranks, ", "))].insert(rank);
}

/// Lists copies of a tied parameter under the name of the first one.
Whole whole_of(const AuditReport& report) {
  Whole whole;
  std::map<std::string, std::string> names;
  for (const AuditedRank& rank : report.ranks) {
    std::set<std::string> ties;
    for (const AuditedParameter& param : rank.parameters) {
      if (param.tie.empty()) {
        add(whole[param.name], rank.rank, param, true);
        continue;
      }
      const std::string& name = names.try_emplace(param.tie, param.name).first->second;
      add(whole[name], rank.rank, param, ties.insert(param.tie).second);
    }
  }
  return whole;
}

/// Says whether a count (that of the norm or of zeros) has all elements on every rank.
Texts counts_of(const AuditReport& report, int64_t AuditedRank::*counted) {
  Texts texts;
  const int64_t all = trained_elements(report);
  for (const AuditedRank& rank : report.ranks) {
    const int64_t found = rank.*counted;
    const std::string text = found == 0     ? "no element"
                             : found == all ? "all elements"
                                            : fmt::format("{} of {} elements", found, all);
    texts[text].insert(rank.rank);
  }
  return texts;
}

class Comparison {
 public:
  void job(const AuditReport& a, const AuditReport& b) {
    const auto scaling = [](const AuditReport& report) {
      return report.scaling.starts_with("average") ? "average" : report.scaling;
    };
    note(result.differences, "", "scaling", scaling(a), scaling(b));
    note(result.differences, "", "elements in the norm",
         text_of(counts_of(a, &AuditedRank::norm_elements)),
         text_of(counts_of(b, &AuditedRank::norm_elements)));
    note(result.differences, "", "elements in the count of zeros",
         text_of(counts_of(a, &AuditedRank::zero_elements)),
         text_of(counts_of(b, &AuditedRank::zero_elements)));
    note(result.layouts, "", "world_size", fmt::to_string(a.world_size),
         fmt::to_string(b.world_size));
    note(result.layouts, "", "layout", a.layout, b.layout);
    note(result.layouts, "", "scaling", a.scaling, b.scaling);
  }

  void parameter(const std::string& name, const WholeParameter& a, const WholeParameter& b) {
    note(result.differences, name, "gradient", text_of(a.gradients), text_of(b.gradients));
    note(result.differences, name, "norm", norm_text(a), norm_text(b));
    note(result.differences, name, "update", text_of(a.updates), text_of(b.updates));
    note(result.differences, name, "padding", a.padding, b.padding);
    const bool padded = !a.padding.empty() && a.padding == b.padding;
    note(padded ? result.layouts : result.differences, name, "elements", elements_text(a),
         elements_text(b));
    note(result.layouts, name, "shape", text_of(a.shapes), text_of(b.shapes));
    note(result.layouts, name, "description", text_of(a.descriptions), text_of(b.descriptions));
    note(result.layouts, name, "reduction", text_of(a.reductions), text_of(b.reductions));
    note(result.layouts, name, "terms", text_of(a.terms), text_of(b.terms));
    note(result.layouts, name, "tokens", text_of(a.tokens), text_of(b.tokens));
    held(result.layouts, name, a.ranks, b.ranks);
  }

  void held(std::vector<AuditDifference>& list, const std::string& name, const std::set<int64_t>& a,
            const std::set<int64_t>& b) {
    const auto text = [](const std::set<int64_t>& ranks) {
      return ranks.empty() ? "by no rank" : fmt::format("by ranks [{}]", fmt::join(ranks, ", "));
    };
    note(list, name, "held", text(a), text(b));
  }

  AuditComparison result;

 private:
  static void note(std::vector<AuditDifference>& list, const std::string& name, const char* field,
                   const std::string& a, const std::string& b) {
    if (a != b) list.push_back({name, field, a, b});
  }
};

void require_all_ranks(const AuditReport& report, const std::string& name) {
  require<UsageError>(static_cast<int64_t>(report.ranks.size()) == report.world_size,
                      "{}: found {} of {}, allowed: all", name,
                      counted(static_cast<int64_t>(report.ranks.size()), "rank"),
                      report.world_size);
}

nlohmann::ordered_json json_of(const std::vector<AuditDifference>& differences) {
  auto list = nlohmann::ordered_json::array();
  for (const AuditDifference& one : differences)
    list.push_back(
        {{"parameter", one.parameter}, {"field", one.field}, {"a", one.a}, {"b", one.b}});
  return list;
}

}  // namespace

AuditComparison compare_audits(const AuditReport& a, const AuditReport& b,
                               const std::string& name_a, const std::string& name_b) {
  require_all_ranks(a, name_a);
  require_all_ranks(b, name_b);
  Comparison comparison;
  comparison.job(a, b);
  const Whole of_a = whole_of(a), of_b = whole_of(b);
  Whole all = of_a;
  all.insert(of_b.begin(), of_b.end());
  comparison.result.parameters = static_cast<int64_t>(all.size());
  for (const auto& [name, unused] : all) {
    const auto in_a = of_a.find(name), in_b = of_b.find(name);
    if (in_a != of_a.end() && in_b != of_b.end())
      comparison.parameter(name, in_a->second, in_b->second);
    else
      comparison.held(comparison.result.differences, name,
                      in_a == of_a.end() ? std::set<int64_t>() : in_a->second.ranks,
                      in_b == of_b.end() ? std::set<int64_t>() : in_b->second.ranks);
  }
  return comparison.result;
}

std::string to_json(const AuditComparison& comparison) {
  const nlohmann::ordered_json json = {{"equivalent", comparison.equivalent()},
                                       {"parameters", comparison.parameters},
                                       {"differences", json_of(comparison.differences)},
                                       {"layouts", json_of(comparison.layouts)}};
  return json.dump() + "\n";
}

std::string to_text(const AuditComparison& comparison) {
  std::string text;
  for (const AuditDifference& one : comparison.differences)
    text += fmt::format("{}: {}\n  A: {}\n  B: {}\n", one.parameter.empty() ? "job" : one.parameter,
                        one.field, one.a, one.b);
  std::map<std::string, int64_t> fields;
  for (const AuditDifference& one : comparison.layouts) {
    if (one.parameter.empty())
      text += fmt::format("layout: {}: {} and {}\n", one.field, one.a, one.b);
    else
      ++fields[one.field];
  }
  for (const auto& [field, parameters] : fields)
    text += fmt::format("layout: {}: other in {}\n", field, counted(parameters, "parameter"));
  const auto found = static_cast<int64_t>(comparison.differences.size());
  return text + fmt::format("{}, {}\n", counted(comparison.parameters, "parameter"),
                            found == 0
                                ? "equivalent"
                                : fmt::format("not equivalent: {}", counted(found, "difference")));
}

}  // namespace lockstep
