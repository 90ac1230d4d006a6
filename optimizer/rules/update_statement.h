#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/distributed/param_layout.h"

/// What an update rule keeps and what it must be given, as plain data that needs no libtorch. The
/// planner counts its bytes, and the ranks compare it.
namespace lockstep {

/// One number for each element of a parameter, kept from step to step. Zero before the first.
struct UpdateState {
  std::string name;                     ///< in checkpoints: letters, digits and _, but not "master"
  StateDtype dtype = StateDtype::fp32;  ///< for fp64 parameters, fp32 means fp64
  std::string setting = {};             ///< the setting that chose `dtype`, for messages
};

/// What an update is given in one call.
enum class UpdateUnit {
  /// Elements of any parameters, cut anywhere. The rule treats each element by itself.
  range,
  /// One whole parameter. This applies to parameters with ParamUpdate::matrix under
  /// MatrixLayout::whole, which are not cut over data-parallel ranks; other parameters use adam. A
  /// matrix that is cut over tensor-parallel ranks (for an expert, over etp) is gathered for the
  /// update and looks as on one rank. This takes an all-gather of the weights, one of the gradient
  /// and one of each state; muon gathers one tensor. If experts are distributed over several ranks,
  /// the parameter holds this rank's experts.
  matrix,
};

/// "range", "matrix"
const char* to_string(UpdateUnit unit);

struct UpdateStatement {
  std::string name;           ///< "adam", for messages
  std::string settings = {};  ///< its numbers, "beta1 0.9, beta2 0.99", the same on all ranks
  std::vector<UpdateState> state = {};
  UpdateUnit unit = UpdateUnit::range;

  /// UsageError naming the rule: no name, or names of states that are not allowed or not unique.
  void validate() const;
};

/// "lion (beta1 0.9, beta2 0.99), by range, state: exp_avg fp32"
std::string to_string(const UpdateStatement& statement);

/// The kind whose rule a buffer takes by `config`. `whole_matrices`: it holds those of
/// MatrixLayout::whole.
OptimizerKind update_kind(const OptimizerConfig& config, bool whole_matrices);

/// What the rule of a buffer states. `own`, unless null, is a rule that takes the place of
/// optimizer.optimizer.
UpdateStatement update_statement(const OptimizerConfig& config, bool whole_matrices,
                                 const UpdateStatement* own = nullptr);

/// How DistributedDataParallel must lay out the matrices (ParamUpdate::matrix): whole for rules of
/// UpdateUnit::matrix, such as muon, cut for the others.
MatrixLayout matrix_layout(const OptimizerConfig& config, const UpdateStatement* own = nullptr);

/// Bytes of optimizer state for an element of a parameter of `param_bytes` bytes: master weights
/// of 4 bytes where it has 2, and what the rule keeps.
int64_t state_bytes_of_element(const UpdateStatement& statement, int64_t param_bytes);

}  // namespace lockstep
