#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// What becomes of each gradient in a step, as data without libtorch.
namespace lockstep {

/// Terms of a final gradient: each of these ranks' local gradients reaches it, times
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
  /// Of the elements that it holds, before the division by the tokens; none where it holds none.
  std::vector<AuditTerms> terms = {};
  /// The ranks whose tokens add up to the divisor; none where the gradients are averages, or where
  /// the rank holds none of them.
  std::vector<int64_t> token_ranks = {};
  bool counted = false;  ///< this rank counts what it holds in the gradient norm
  /// "adam, by range, state exp_avg exp_avg_sq, max_lr 0.01, min_lr 0, wd_mult 1, gradients x 1 /
  /// loss scale, norm at most 1"; empty without an optimizer
  std::string update = {};
  std::string tie = {};  ///< the name of its tie; empty: it is not tied
  int64_t copies = 1;    ///< ranks of one model that hold the same elements, by the description
  int64_t replicas = 1;  ///< data-parallel ranks, or optimizer instances, that hold the same
  /// `terms` and `token_ranks` without the layout, the same for all layouts that train the same:
  /// "every term x 1, divided by all tokens"; empty where the rank holds none of the elements.
  std::string effect = {};
  /// Why what was measured is no sum of terms, such as other terms in other elements, or is divided
  /// by no sum of tokens; else empty. Then `terms` is empty, or `token_ranks`.
  std::string problem = {};
  bool operator==(const AuditedParameter&) const = default;
};

struct AuditedRank {
  int64_t rank = 0;
  /// Elements of the whole model that the gradient norm counts on this rank, and that the count of
  /// zeros counts where all gradients are zero. 0 where the loop has no norm.
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
/// Back. FileError naming `source` and the field: one that is missing, of another type or beyond
/// its bounds, or a rank that is listed twice.
AuditReport parse_audit_report(const std::string& json, const std::string& source);
/// One rank's part of it, and back.
std::string to_json(const AuditedRank& rank);
AuditedRank parse_audited_rank(const std::string& json, const std::string& source);

/// For people: of each parameter one paragraph for all ranks that have the same of it.
std::string to_text(const AuditReport& report);

/// The elements of the model that are trained, by what all ranks of `report` hold.
int64_t trained_elements(const AuditReport& report);

/// What differs, a line for each field of each parameter on each rank; none if nothing does:
/// "rank 0, `a`: terms: worked out 1 x ranks [0, 1], measured 2 x ranks [0, 1]".
std::vector<std::string> audit_differences(const AuditReport& worked_out,
                                           const AuditReport& measured);

}  // namespace lockstep
