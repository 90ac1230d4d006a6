#include "lockstep/optimizer/audit_report.h"

#include <map>
#include <set>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"

namespace lockstep {
namespace {

std::string list_text(const std::vector<int64_t>& numbers) {
  return fmt::format("[{}]", fmt::join(numbers, ", "));
}

std::string terms_text(const std::vector<AuditTerms>& terms) {
  std::string text;
  for (const AuditTerms& of : terms) {
    const std::string denominator = of.denominator == 1 ? "" : fmt::format("/{}", of.denominator);
    text += fmt::format("{}{}{} x ranks {}", text.empty() ? "" : " + ", of.numerator, denominator,
                        list_text(of.ranks));
  }
  return text.empty() ? "none" : text;
}

/// The lines of to_text() that ranks may share.
std::string paragraph_of(const AuditedParameter& param) {
  std::string text = fmt::format(
      " {}: {}\n  {}\n  gradient: {}{}\n", list_text(param.shape), param.description,
      param.reduction, terms_text(param.terms),
      param.token_ranks.empty()
          ? ""
          : fmt::format(", divided by the tokens of ranks {}", list_text(param.token_ranks)));
  if (!param.problem.empty()) text += fmt::format("  {}\n", param.problem);
  if (!param.update.empty()) text += fmt::format("  update: {}\n", param.update);
  return text;
}

/// Compares the fields of one parameter.
class FieldComparison {
 public:
  FieldComparison(std::string where, std::vector<std::string>& lines)
      : where_(std::move(where)), lines_(lines) {}

  void compare(const char* field, const std::string& worked_out, const std::string& measured) {
    if (worked_out != measured)
      lines_.push_back(
          fmt::format("{}: {}: expected {}, measured {}", where_, field, worked_out, measured));
  }

 private:
  std::string where_;
  std::vector<std::string>& lines_;
};

void compare_params(const std::string& where, const AuditedParameter& a, const AuditedParameter& b,
                    std::vector<std::string>& lines) {
  FieldComparison fields(where, lines);
  const auto elements = [](const AuditedParameter& param) {
    return fmt::format("{} to {}", param.first, param.last);
  };
  fields.compare("shape", list_text(a.shape), list_text(b.shape));
  fields.compare("description", a.description, b.description);
  fields.compare("reduction", a.reduction, b.reduction);
  fields.compare("elements", elements(a), elements(b));
  const bool terms_known = b.problem.empty() || !b.terms.empty();
  fields.compare("terms", terms_text(a.terms), terms_known ? terms_text(b.terms) : b.problem);
  if (terms_known)
    fields.compare("tokens", list_text(a.token_ranks),
                   b.problem.empty() ? list_text(b.token_ranks) : b.problem);
  fields.compare("counted in the norm", a.counted ? "yes" : "no", b.counted ? "yes" : "no");
  fields.compare("update", a.update, b.update);
}

void compare_ranks(const AuditedRank& a, const AuditedRank& b, std::vector<std::string>& lines) {
  FieldComparison of_rank(fmt::format("rank {}", a.rank), lines);
  of_rank.compare("elements in the norm", fmt::to_string(a.norm_elements),
                  fmt::to_string(b.norm_elements));
  of_rank.compare("elements in the count of zeros", fmt::to_string(a.zero_elements),
                  fmt::to_string(b.zero_elements));
  std::map<std::pair<int64_t, std::string>, const AuditedParameter*> of_b;
  for (const AuditedParameter& param : b.parameters) of_b[{param.chunk, param.name}] = &param;
  for (const AuditedParameter& param : a.parameters) {
    const std::string where = fmt::format("rank {}, `{}`", a.rank, param.name);
    const auto found = of_b.find({param.chunk, param.name});
    if (found == of_b.end()) {
      lines.push_back(where + ": not in the measured audit");
      continue;
    }
    compare_params(where, param, *found->second, lines);
    of_b.erase(found);
  }
  for (const auto& [key, param] : of_b)
    lines.push_back(fmt::format("rank {}, `{}`: not in the expected audit", b.rank, param->name));
}

}  // namespace

std::string to_text(const AuditReport& report) {
  std::string text = fmt::format("{} rank{} ({}), {} scaling\n", report.world_size,
                                 report.world_size == 1 ? "" : "s", report.layout, report.scaling);
  std::map<std::string, std::vector<int64_t>> holding, counting;
  std::vector<std::string> order;
  for (const AuditedRank& rank : report.ranks)
    for (const AuditedParameter& param : rank.parameters) {
      const std::string paragraph = param.name + paragraph_of(param);
      if (holding[paragraph].empty()) order.push_back(paragraph);
      holding[paragraph].push_back(rank.rank);
      if (param.counted) counting[paragraph].push_back(rank.rank);
    }
  for (const std::string& paragraph : order)
    text += fmt::format("\n{}  held by ranks {}, counted in the norm by {}\n", paragraph,
                        list_text(holding[paragraph]), list_text(counting[paragraph]));
  return text;
}

int64_t trained_elements(const AuditReport& report) {
  std::map<int64_t, int64_t> held;  // by how often each element is held
  for (const AuditedRank& rank : report.ranks) {
    std::set<std::string> ties;  // only the first of several copies on a rank counts
    for (const AuditedParameter& param : rank.parameters)
      if (param.tie.empty() || ties.insert(param.tie).second)
        held[checked_mul(param.copies, param.replicas, param.name)] += param.last - param.first;
  }
  int64_t elements = 0;
  for (const auto& [times, of_all] : held) elements += of_all / times;
  return elements;
}

std::vector<std::string> audit_differences(const AuditReport& worked_out,
                                           const AuditReport& measured) {
  std::vector<std::string> lines;
  FieldComparison job("job", lines);
  job.compare("layout", worked_out.layout, measured.layout);
  job.compare("scaling", worked_out.scaling, measured.scaling);
  std::map<int64_t, const AuditedRank*> ranks;
  for (const AuditedRank& rank : measured.ranks) ranks[rank.rank] = &rank;
  for (const AuditedRank& rank : worked_out.ranks) {
    const auto found = ranks.find(rank.rank);
    if (found == ranks.end())
      lines.push_back(fmt::format("rank {}: not in the measured audit", rank.rank));
    else
      compare_ranks(rank, *found->second, lines);
    ranks.erase(rank.rank);
  }
  for (const auto& [rank, unused] : ranks)
    lines.push_back(fmt::format("rank {}: not in the expected audit", rank));
  return lines;
}

}  // namespace lockstep
