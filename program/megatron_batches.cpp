#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "lockstep/core/check.h"
#include "lockstep/core/config_rules.h"
#include "lockstep/core/integers.h"
#include "lockstep/datasets/batch_sizes.h"
#include "lockstep/program/megatron_rules.h"

namespace lockstep {
namespace {

using Settings = MegatronSettings;

/// `number` as an integer; `found` tells it in the error of a number that is none or too large.
int64_t to_integer(double number, const std::string& flag, const std::string& found) {
  require<ConfigError>(std::abs(number) <= 1e15, "{}: found {}, allowed: -1e15 to 1e15", flag,
                       found);
  return static_cast<int64_t>(number);
}

/// Converts samples into iterations of the global batch, rounded; notes what rounding loses.
void set_iterations(Settings& s, const std::string& flag, const std::string& field, double exact) {
  const double rounded = std::round(exact);
  s.set(field, to_integer(rounded, flag, fmt::format("{:g} iterations", rounded)));
  if (std::abs(exact - rounded) > 1e-6)
    s.note(flag,
           fmt::format("rounded: {} is {}, exactly {:.2f} iterations", field, rounded, exact));
}

std::string rampup_of(const Settings& s) {
  return fmt::format("{}", fmt::join(s.values("--rampup-batch-size"), " "));
}

/// Iterations until `samples` have been consumed while the batch grows, as Megatron Core counts
/// them: whole batches after the growth. Unset: `rampup` is not a growth to `global`, or its sizes
/// are too many.
std::optional<int64_t> growing_iterations(int64_t samples, int64_t global,
                                          const std::string& rampup) {
  constexpr int64_t kMostSizes = 100'000;  // which are counted one by one
  TrainConfig train;
  train.micro_batch_size = 1;
  train.global_batch_size = global;
  train.rampup_batch_size = rampup;
  try {
    const BatchRampUp ramp = parse_rampup_batch_size(rampup);
    if ((global - ramp.start) / ramp.increment > kMostSizes) return std::nullopt;
    const BatchSchedule batches(train, /*data_parallel_size=*/1);
    const int64_t last = std::min(ramp.samples, samples);
    const int64_t iterations = batches.iterations_until(checked_add(last, 1, "--train-samples"));
    const int64_t rest = samples - batches.samples_of(iterations);
    return iterations + std::max<int64_t>(rest, 0) / global;
  } catch (const Error&) {
    return std::nullopt;  // said once the configuration is checked
  }
}

/// train.train_iters of --train-samples while the batch grows. The learning rate decays over the
/// samples, which are fewer than that many whole batches.
void count_growth(Settings& s, int64_t global) {
  const int64_t samples = *s.integer("--train-samples");
  const auto iterations = growing_iterations(samples, global, rampup_of(s));
  if (!iterations) {
    s.unset("train.train_iters");
    return s.note("--train-samples",
                  "not there: with that --rampup-batch-size train.train_iters cannot be computed");
  }
  s.set("train.train_iters", *iterations);
  if (!s.has("--lr-decay-samples"))
    set_iterations(s, "--train-samples", "optimizer.lr_decay_iters",
                   static_cast<double>(samples) / static_cast<double>(global));
}

/// Without --lr-decay-iters Megatron-LM's decay lasts for --train-iters whole batches, even while
/// the batch grows; here an unset decay ends with the run.
void decay_over_full_batches(Settings& s) {
  const int64_t iterations = *s.integer("--train-iters");
  if (iterations > 0 && !s.found("optimizer.lr_decay_iters"))
    s.set("optimizer.lr_decay_iters", iterations);
}

void apply_samples(Settings& s) {
  s.exclude("--train-iters", "--train-samples");
  s.exclude("--lr-warmup-fraction", "--lr-warmup-iters");
  s.exclude("--lr-warmup-fraction", "--lr-warmup-samples");
  const auto batch = s.integer("--global-batch-size");
  const auto in_iterations = [&](const std::string& flag, const std::string& field, bool floors) {
    const auto samples = s.integer(flag);
    if (!samples) return;
    if (!batch || *batch < 1 || s.has("--step-batch-size-schedule"))
      return s.note(flag, "not there: without a constant --global-batch-size " + field +
                              " cannot be computed");
    const double exact = static_cast<double>(*samples) / static_cast<double>(*batch);
    set_iterations(s, flag, field, floors ? std::floor(exact) : exact);
  };
  in_iterations("--train-samples", "train.train_iters", /*floors=*/true);
  if (s.found("train.train_iters") && s.has("--train-samples") && s.has("--rampup-batch-size"))
    count_growth(s, *batch);
  in_iterations("--lr-decay-samples", "optimizer.lr_decay_iters", /*floors=*/false);
  if (s.has("--train-iters") && s.has("--rampup-batch-size")) decay_over_full_batches(s);
  in_iterations("--lr-wsd-decay-samples", "optimizer.lr_wsd_decay_iters", /*floors=*/false);
  in_iterations("--lr-warmup-samples", "optimizer.lr_warmup_iters", /*floors=*/false);
  const auto fraction = s.number("--lr-warmup-fraction");
  if (!fraction) return;
  const auto whole = s.found("optimizer.lr_decay_iters");
  const auto decay = whole ? whole : s.found("train.train_iters");
  require<ConfigError>(decay.has_value(),
                       "--lr-warmup-fraction: needs --lr-decay-iters or "
                       "--train-iters");
  set_iterations(s, "--lr-warmup-fraction", "optimizer.lr_warmup_iters",
                 *fraction * std::stod(*decay));
}

/// "2.4B" tokens.
int64_t tokens_of(const std::string& text) {
  constexpr std::string_view kSuffixes = "KMBT";
  std::istringstream stream(text);
  double number = 0;
  char suffix = 0;
  require<ConfigError>(static_cast<bool>(stream >> number),
                       "--step-batch-size-schedule: found '{}', allowed: a number, with K, M, B or "
                       "T behind it",
                       text);
  if (stream >> suffix) {
    const size_t power = kSuffixes.find(static_cast<char>(std::toupper(suffix)));
    require<ConfigError>(power != std::string_view::npos,
                         "--step-batch-size-schedule: found '{}', allowed after a number: K, M, B "
                         "or T",
                         text);
    number *= std::pow(1000.0, static_cast<double>(power + 1));
  }
  return to_integer(number, "--step-batch-size-schedule", "'" + text + "'");
}

void apply_batch_sizes(Settings& s) {
  if (s.has("--rampup-batch-size")) s.set("train.rampup_batch_size", rampup_of(s));
  const auto schedule = s.value("--step-batch-size-schedule");
  if (!schedule) {
    if (s.has("--global-batch-size")) s.copy("--global-batch-size", "train.global_batch_size");
    return;
  }
  if (s.has("--global-batch-size"))
    s.note("--global-batch-size",
           "left out: Megatron-LM refuses it together with --step-batch-size-schedule");
  const int64_t length = std::max<int64_t>(s.integer_or("--seq-length", 1), 1);
  std::string text = *schedule, steps;
  std::replace(text.begin(), text.end(), ',', ' ');
  std::istringstream parts(text);
  for (std::string part; parts >> part;) {
    const size_t colon = part.find(':');
    require<ConfigError>(colon != std::string::npos,
                         "--step-batch-size-schedule: found '{}', allowed: TOKENS:BATCH", part);
    steps +=
        fmt::format("{}{}:{}", steps.empty() ? "" : " ", tokens_of(part.substr(0, colon)) / length,
                    tokens_of(part.substr(colon + 1)));
  }
  s.set("train.step_batch_size_schedule", steps);
}

/// Notes the schedules that count other batches than Megatron-LM's where the batch changes size.
void note_schedules(Settings& s) {
  const bool steps = s.has("--step-batch-size-schedule");
  if (!steps && !s.has("--rampup-batch-size")) return;
  const char* const flag = steps ? "--step-batch-size-schedule" : "--rampup-batch-size";
  const char* const theirs = steps ? "micro-batch-size x data-parallel size" : "global-batch-size";
  std::vector<std::string> given, ending;
  for (const char* field : {"lr_warmup_iters", "lr_decay_iters", "lr_wsd_decay_iters"})
    if (s.found(fmt::format("optimizer.{}", field))) given.emplace_back(field);
  if (steps && !given.empty())
    s.note(flag, fmt::format("optimizer.{} count{} batches of the last step here; Megatron-LM "
                             "counts {}",
                             fmt::join(given, ", "), given.size() == 1 ? "s" : "", theirs));
  if (!s.has("--train-iters")) return;
  if (!s.found("optimizer.lr_decay_iters") &&
      s.found("optimizer.lr_decay_style").value_or("") != "constant")
    ending.emplace_back("the decay of the learning rate");
  if (s.found("optimizer.weight_decay_incr_style").value_or("constant") != "constant")
    ending.emplace_back("the schedule of the weight decay");
  if (!ending.empty())
    s.note(flag, fmt::format("{} end{} with the run here; in Megatron-LM after train-iters batches "
                             "of {}",
                             fmt::join(ending, " and "), ending.size() == 1 ? "s" : "", theirs));
}

}  // namespace

void apply_batches(MegatronSettings& settings) {
  apply_batch_sizes(settings);
  apply_samples(settings);
  note_schedules(settings);
}

}  // namespace lockstep
