#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>

#include "lockstep/core/check.h"
#include "lockstep/program/megatron_rules.h"

namespace lockstep {
namespace {

using Settings = MegatronSettings;

/// Delayed scaling, whose defaults differ in Megatron-LM.
void apply_delayed_scaling(Settings& s) {
  s.set("train.fp8_amax_history_len", s.integer("--fp8-amax-history-len").value_or(1));
  s.set("train.fp8_amax_compute_algo", s.value("--fp8-amax-compute-algo").value_or("most_recent"));
  s.set("train.fp8_margin", s.integer("--fp8-margin").value_or(0));
}

using Flags = std::initializer_list<const char*>;
constexpr Flags kOfDelayed = {"--fp8-margin", "--fp8-amax-history-len", "--fp8-amax-compute-algo"};
constexpr const char* kAtStart = "--num-layers-at-start-in-bf16";
constexpr const char* kAtEnd = "--num-layers-at-end-in-bf16";
constexpr Flags kOfLayers = {kAtStart, kAtEnd};

void note_unneeded(Settings& s, Flags flags, const std::string& reason) {
  for (const char* const flag : flags)
    if (s.has(flag)) s.note(flag, fmt::format("not needed: {} it has no effect", reason));
}

void apply_fp8_recipe(Settings& s) {
  const std::string recipe = s.value("--fp8-recipe").value_or("delayed");
  if (s.has("--fp8-recipe")) s.copy("--fp8-recipe", "train.fp8_recipe");
  const bool known = !s.has("--fp8-recipe") || s.found("train.fp8_recipe");
  if (!known) s.note("--fp8-recipe", "the configuration has delayed instead");
  if (!known || recipe == "delayed") return apply_delayed_scaling(s);
  note_unneeded(s, kOfDelayed, fmt::format("with --fp8-recipe {}", recipe));
}

/// --fp8-format itself is copied.
void apply_fp8(Settings& s) {
  if (!s.found("train.fp8")) {
    const std::string reason =
        fmt::format("without {}--fp8-format", s.has("--fp8-format") ? "that " : "");
    note_unneeded(s, {"--fp8-recipe", "--first-last-layers-bf16"}, reason);
    note_unneeded(s, kOfDelayed, reason);
    return note_unneeded(s, kOfLayers, reason);
  }
  apply_fp8_recipe(s);
  if (!s.has("--first-last-layers-bf16"))
    return note_unneeded(s, kOfLayers, "without --first-last-layers-bf16");
  const int64_t start = s.integer_or(kAtStart, 1), end = s.integer_or(kAtEnd, 1);
  s.set("train.num_layers_at_start_in_bf16", start);
  s.set("train.num_layers_at_end_in_bf16", end);
  const int64_t layers = s.integer_or("--num-layers", std::numeric_limits<int64_t>::max());
  if (start >= layers || (start >= 0 && end >= layers - start))
    s.note("--first-last-layers-bf16",
           fmt::format("leaves none of the {} layers for --fp8-format, which `train` refuses",
                       layers));
}

/// Gradients that are sent in a narrower type, added up in fp32.
void apply_sum_in_fp32(Settings& s) {
  constexpr const char* kFlag = "--ddp-reduce-scatter-with-fp32-accumulation";
  if (!s.has(kFlag)) return;
  if (s.found("ddp.grad_reduce_in_fp32") == "false")
    s.set("ddp.reduce_scatter_with_fp32_accumulation", true);
  else
    s.note(kFlag, "not needed: gradients are reduced in fp32");
}

}  // namespace

void apply_precision(MegatronSettings& s) {
  require<ConfigError>(!s.has("--bf16") || !s.has("--fp16"),
                       "--bf16 and --fp16: allowed: one of the two");
  const bool bf16 = s.has("--bf16"), fp16 = s.has("--fp16");
  if (bf16 || fp16) s.set("train.precision", std::string(bf16 ? "bf16" : "fp16"));
  if (bf16) s.set("ddp.grad_reduce_in_fp32", !s.has("--grad-reduce-in-bf16"));
  if (fp16) s.set("ddp.grad_reduce_in_fp32", s.has("--accumulate-allreduce-grads-in-fp32"));
  const bool is_fixed = s.number("--loss-scale").value_or(0) != 0;
  if (is_fixed) s.copy("--loss-scale", "optimizer.loss_scale");
  const bool adapts = fp16 && !is_fixed;
  if (!s.has("--no-check-for-nan-in-loss-and-grad") && !adapts)
    s.set("ddp.check_for_nan_in_grad", true);
  apply_sum_in_fp32(s);
  apply_fp8(s);
}

}  // namespace lockstep
