#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/optimizer/audit_report.h"

/// Two audits compared with each other: of two layouts of a model, of two runs, or of a plan and a
/// run.
namespace lockstep {

struct AuditDifference {
  std::string parameter = {};  ///< name of its first copy; empty: the whole job
  std::string field = {};      ///< "gradient", "norm", "update", "elements", "held", "scaling", ...
  std::string a = {}, b = {};
  bool operator==(const AuditDifference&) const = default;
};

struct AuditComparison {
  int64_t parameters = 0;  ///< on either side; tied copies count as one
  /// What the two sides train differently: AuditedParameter::effect, the update, how often the norm
  /// counts each element, how many elements there are, and whether gradients are averaged.
  std::vector<AuditDifference> differences = {};
  /// Differences in how the ranks divide the work, which do not change the training: number of
  /// ranks, layout, shapes, descriptions, buckets and groups, ranks of the terms and of the tokens.
  std::vector<AuditDifference> layouts = {};
  bool equivalent() const { return differences.empty(); }
};

/// UsageError: a report that lacks ranks; the message calls it `name_a` or `name_b`.
AuditComparison compare_audits(const AuditReport& a, const AuditReport& b,
                               const std::string& name_a = "A", const std::string& name_b = "B");

/// One JSON document, with a newline: equivalent, parameters, differences and layouts. Each entry
/// of the last two has parameter, field, a, b.
std::string to_json(const AuditComparison& comparison);

/// For people: the differences, and how many parameters differ in each field of the layouts.
std::string to_text(const AuditComparison& comparison);

}  // namespace lockstep
