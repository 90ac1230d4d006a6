#include "lockstep/training/schedule_notes.h"

#include <optional>

#include "lockstep/core/check.h"
#include "lockstep/core/config_rules.h"
#include "lockstep/core/counted.h"

namespace lockstep {
namespace {

/// The iterations that the decay is said to take. Unset: there is none, or it ends with the run.
std::optional<int64_t> given_decay(const OptimizerConfig& optimizer) {
  if (optimizer.lr_decay_style == LrDecayStyle::constant) return std::nullopt;
  return optimizer.lr_decay_iters;
}

/// Empty if the decay does not end early.
std::string early_end_of_decay(const Config& config, const BatchSchedule& batches) {
  const int64_t iterations = config.train.train_iters;
  const auto decay = given_decay(config.optimizer);
  if (!decay) return "";
  const int64_t end = batches.iterations_for(*decay);
  if (end >= iterations) return "";
  return fmt::format(
      "optimizer.lr_decay_iters is {} and train.train_iters {}: after iteration {} the learning "
      "rate stays at optimizer.min_lr ({})",
      *decay, iterations, end, config.optimizer.min_lr);
}

/// Empty if every number of iterations is what it says.
std::string other_iterations(const Config& config, const BatchSchedule& batches) {
  if (!has_changing_batch(config.train)) return "";
  std::vector<std::string> fields, lengths;
  const auto compare = [&](const char* field, const char* what, int64_t given) {
    const int64_t taken = batches.iterations_for(given);
    if (taken == given) return;
    fields.push_back(fmt::format("optimizer.{} = {}", field, given));
    lengths.push_back(fmt::format("the {} takes {}", what, counted(taken, "iteration")));
  };
  compare("lr_warmup_iters", "warm-up", config.optimizer.lr_warmup_iters);
  if (const auto decay = given_decay(config.optimizer)) compare("lr_decay_iters", "decay", *decay);
  if (fields.empty()) return "";
  return fmt::format(
      "{} {} batches of {}: with train.{} {}", fmt::join(fields, " and "),
      fields.size() == 1 ? "counts" : "count", batches.full().global,
      config.train.rampup_batch_size ? "rampup_batch_size" : "step_batch_size_schedule",
      fmt::join(lengths, " and "));
}

}  // namespace

std::vector<std::string> schedule_notes(const Config& config, const BatchSchedule& batches) {
  std::vector<std::string> notes;
  for (const std::string& note :
       {early_end_of_decay(config, batches), other_iterations(config, batches)})
    if (!note.empty()) notes.push_back(note);
  return notes;
}

}  // namespace lockstep
