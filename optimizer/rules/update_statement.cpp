#include "lockstep/optimizer/update_statement.h"

#include <set>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

constexpr const char* kNameCharacters =
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";

UpdateStatement statement_of(OptimizerKind kind, const OptimizerConfig& config) {
  const UpdateState momentum = {"momentum_buffer"};
  switch (kind) {
    case OptimizerKind::adam:
      return {.name = "adam",
              .state = {{"exp_avg", config.exp_avg_dtype, "optimizer.exp_avg_dtype"},
                        {"exp_avg_sq", config.exp_avg_sq_dtype, "optimizer.exp_avg_sq_dtype"}}};
    case OptimizerKind::sgd:
      if (config.sgd_momentum == 0) return {.name = "sgd"};
      return {.name = "sgd", .state = {momentum}};
    case OptimizerKind::muon:
      return {.name = "muon", .state = {momentum}, .unit = UpdateUnit::matrix};
  }
  fail<UsageError>("unknown kind of optimizer {}", static_cast<int>(kind));
}

}  // namespace

const char* to_string(UpdateUnit unit) { return unit == UpdateUnit::range ? "range" : "matrix"; }

void UpdateStatement::validate() const {
  require<UsageError>(!name.empty(), "update rule: found no name, allowed: one");
  std::set<std::string> names;
  for (const UpdateState& one : state) {
    require<UsageError>(
        !one.name.empty() && one.name.find_first_not_of(kNameCharacters) == std::string::npos &&
            one.name != "master",
        "update rule {}: found a state '{}', allowed: letters, digits and _, but not master", name,
        one.name);
    require<UsageError>(names.insert(one.name).second,
                        "update rule {}: found two states '{}', allowed: names that differ", name,
                        one.name);
  }
}

std::string to_string(const UpdateStatement& statement) {
  std::string text = statement.name;
  if (!statement.settings.empty()) text += fmt::format(" ({})", statement.settings);
  text += fmt::format(", by {}, state:", to_string(statement.unit));
  if (statement.state.empty()) text += " none";
  for (const UpdateState& one : statement.state)
    text += fmt::format(" {} {}", one.name, to_string(one.dtype));
  return text;
}

OptimizerKind update_kind(const OptimizerConfig& config, bool whole_matrices) {
  const bool takes_matrices = statement_of(config.optimizer, config).unit == UpdateUnit::matrix;
  return takes_matrices && !whole_matrices ? OptimizerKind::adam : config.optimizer;
}

UpdateStatement update_statement(const OptimizerConfig& config, bool whole_matrices,
                                 const UpdateStatement* own) {
  if (own == nullptr) return statement_of(update_kind(config, whole_matrices), config);
  const bool takes_buffer = whole_matrices || own->unit == UpdateUnit::range;
  return takes_buffer ? *own : statement_of(OptimizerKind::adam, config);
}

MatrixLayout matrix_layout(const OptimizerConfig& config, const UpdateStatement* own) {
  const UpdateStatement statement = update_statement(config, /*whole_matrices=*/true, own);
  return statement.unit == UpdateUnit::matrix ? MatrixLayout::whole : MatrixLayout::cut;
}

int64_t state_bytes_of_element(const UpdateStatement& statement, int64_t param_bytes) {
  const bool narrow = param_bytes == 2;
  int64_t bytes = narrow ? 4 : 0;
  for (const UpdateState& one : statement.state)
    bytes += one.dtype == StateDtype::bf16 ? 2 : narrow ? 4 : param_bytes;
  return bytes;
}

}  // namespace lockstep
