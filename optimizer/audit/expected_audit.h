#pragma once

// Internal: the audit worked out from descriptions alone, without a process. Needs no libtorch. The
// terms follow from what the descriptions mean, axis by axis, and not from the code that reduces.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/core/placement.h"
#include "lockstep/distributed/gradient_scaling.h"
#include "lockstep/optimizer/audit_report.h"
#include "lockstep/optimizer/update_statement.h"
#include "lockstep/parallel_state/rank_grids.h"

namespace lockstep {

/// A parameter of one rank.
struct DescribedParameter {
  std::string name;
  std::vector<int64_t> shape = {};  ///< on the rank
  ParamDescription description = {};
  std::string dtype = {};  ///< parameters of other dtypes are in other buffers
  bool trained = true;
  int64_t unit = 0;  ///< see number_units()
  double max_lr = 0, min_lr = 0, wd_mult = 0;
};

/// One model chunk of a rank, in the order of registration, frozen parameters included.
struct DescribedChunk {
  std::vector<DescribedParameter> parameters = {};
  bool bucketed = true;                ///< see has_buckets()
  std::vector<GroupKind> unlike = {};  ///< see buffer_kind()
};

struct AuditSettings {
  DistributedDataParallelConfig ddp = {};
  OptimizerConfig optimizer = {};
  const UpdateStatement* own_rule = nullptr;  ///< in place of optimizer.optimizer
  bool with_update = true;                    ///< there is an optimizer
  bool with_buckets = true;                   ///< the report says what is reduced
  bool with_tokens = true;                    ///< per-token gradients are divided by the tokens
  /// The chunks of all ranks are known, so that the elements of the norm can be counted; otherwise
  /// set_elements() counts them when all reports are known.
  bool knows_all_ranks = true;
};

/// The chunks of a rank that have parameters to be trained.
using ChunksOfRank = std::function<std::vector<DescribedChunk>(int64_t rank)>;

/// The audit of the ranks of `grids` that `ranks` lists; of all if it lists none. From ranks that
/// are not listed it needs only the tied parameters, unless settings.knows_all_ranks. UsageError: a
/// parameter that is tied to stages that do not include its rank's stage.
AuditReport expected_audit(const ChunksOfRank& chunks, const RankGrids& grids,
                           const AuditSettings& settings, const std::vector<int64_t>& ranks = {});

/// Sets the numbers by configuration, without overrides: optimizer.lr, for embedding and output
/// decoupled_lr if that is set, and weight decay as the description says.
void set_update_numbers(DescribedParameter& parameter, const OptimizerConfig& config);

/// "tp 2, dp 2": the axes that have several ranks.
std::string layout_text(const RankGrids& grids);

/// "bucket 2 of 5, 7 parameters, all-reduce sum over dp-cp [0, 2]". `instances`: the group over
/// which an all-reduce adds shards; empty: none.
std::string reduction_text(size_t number, size_t buckets, size_t parameters,
                           const std::string& operation, const std::string& group,
                           const std::string& instances);

/// Sets the elements of the norm and of the count of zeros to all elements of the model; `report`
/// has all ranks.
void set_elements(AuditReport& report);

/// "gradients x 1 / loss scale, norm at most 0.5": the factor of gradients that are not clipped,
/// times the loss scale, and the norm of those that are; no norm if optimizer.clip_grad is 0.
std::string step_text(double factor, double norm, const OptimizerConfig& config);
/// The expected text.
std::string step_text(const OptimizerConfig& config);

/// See AuditedParameter::update. `step`: step_text().
std::string update_text(const UpdateStatement& statement, double max_lr, double min_lr,
                        double wd_mult, const std::string& step);

/// Sets what does not depend on the layout, from what does: tie, copies, replicas and, for elements
/// that the rank holds, the effect.
void set_effect(AuditedParameter& param, const ParamDescription& description,
                const RankGrids& grids, int64_t rank, const DistributedDataParallelConfig& ddp);

/// The factor in lowest terms. `denominator` is above 0.
ScalingFactor lowest_terms(int64_t numerator, int64_t denominator);

/// Groups terms with equal factors.
std::vector<AuditTerms> grouped_terms(const std::vector<AuditTerms>& of_single_ranks);

/// Sorts by chunk, then by name.
void sort_parameters(AuditedRank& rank);

}  // namespace lockstep
