#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// What happens to each gradient in a step, as plain data that needs no libtorch.
namespace lockstep {

/// Terms of a final gradient: it contains the local gradient of each of these ranks, times
/// numerator / denominator.
struct AuditTerms {
  int64_t numerator = 1;
  int64_t denominator = 1;
  std::vector<int64_t> ranks = {};  ///< global ones, ascending
  bool operator==(const AuditTerms&) const = default;
};

/// One trained parameter on one rank.
struct AuditedParameter {
  std::string name;
  int64_t chunk = 0;                ///< of the rank's model chunks that have parameters
  std::vector<int64_t> shape = {};  ///< on the rank
  std::string description = {};     ///< as ParamDescription::to_string()
  /// "bucket 2 of 5, 7 parameters, reduce-scatter sum over dp-cp [0, 2]"
  std::string reduction = {};
  /// The elements whose final gradients the rank holds and which it updates: a half-open range of
  /// the flattened parameter, empty where the rank owns none of it.
  int64_t first = 0;
  int64_t last = 0;
  /// The terms of the elements that the rank holds, before the division by the tokens; empty if it
  /// holds none.
  std::vector<AuditTerms> terms = {};
  /// The ranks whose tokens add up to the divisor; empty if the gradients are averaged, or if the
  /// rank holds none of them.
  std::vector<int64_t> token_ranks = {};
  bool counted = false;  ///< this rank counts what it holds in the gradient norm
  /// "adam, by range, state exp_avg exp_avg_sq, max_lr 0.01, min_lr 0, wd_mult 1, gradients x 1 /
  /// loss scale, norm at most 1"; empty without an optimizer
  std::string update = {};
  std::string tie = {};  ///< the name of its tie; empty: it is not tied
  int64_t copies = 1;    ///< ranks of one model that hold the same elements, by the description
  int64_t replicas = 1;  ///< data-parallel ranks, or optimizer instances, that hold the same
  /// `terms` and `token_ranks` expressed independently of the layout, so the same for all layouts
  /// that train the same: "every term x 1, divided by all tokens"; empty if the rank holds none of
  /// the elements.
  std::string effect = {};
  /// Why the measured values are not a sum of terms (for example different terms in different
  /// elements), or are not divided by a sum of tokens. Then `terms` or `token_ranks` is empty.
  /// Empty if there is no problem.
  std::string problem = {};
  bool operator==(const AuditedParameter&) const = default;
};

struct AuditedRank {
  int64_t rank = 0;
  /// Elements of the whole model that the gradient norm counts, as this rank sees it, and that the
  /// count of zeros counts if all gradients are zero, both with rows of padding. 0 if the loop has
  /// no norm.
  int64_t norm_elements = 0;
  int64_t zero_elements = 0;
  std::vector<AuditedParameter> parameters = {};  ///< in the order of chunks, then of names
  bool operator==(const AuditedRank&) const = default;
};

struct AuditReport {
  int64_t world_size = 1;
  std::string layout = {};   ///< "tp 2, dp 2"
  std::string scaling = {};  ///< "per-token", "average", "average-in-collective"
  std::vector<AuditedRank> ranks = {};
  bool operator==(const AuditReport&) const = default;
};

/// One JSON document, with a newline: the fields above by their names.
std::string to_json(const AuditReport& report);
/// Parses the text of to_json(). FileError, naming `source` and the field: a field that is missing,
/// of another type or out of bounds, or a rank that is listed twice.
AuditReport parse_audit_report(const std::string& json, const std::string& source);
/// One rank's part of the report as JSON, and its parser.
std::string to_json(const AuditedRank& rank);
AuditedRank parse_audited_rank(const std::string& json, const std::string& source);

/// For people: for each parameter, all ranks with the same entries share one paragraph.
std::string to_text(const AuditReport& report);

/// The number of trained elements of the model, from what all ranks of `report` hold.
int64_t trained_elements(const AuditReport& report);

/// What differs, one line for each field of each parameter on each rank; empty if nothing differs:
/// "rank 0, `a`: terms: expected 1 x ranks [0, 1], measured 2 x ranks [0, 1]".
std::vector<std::string> audit_differences(const AuditReport& worked_out,
                                           const AuditReport& measured);

}  // namespace lockstep
