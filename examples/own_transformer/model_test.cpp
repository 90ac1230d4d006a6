// Compares the model of model.h to one process, with ranks as threads of this program.

#include "model.h"

#include <cstdio>

#include "lockstep/testing/testing.h"

namespace {

using namespace lockstep::testing;

std::shared_ptr<own::Stage> make(const lockstep::ParallelContext& context) {
  return std::make_shared<own::Stage>(context);
}

at::Tensor loss(own::Stage& stage, const StageInput& input) {
  const auto data_ranks = input.context.state.group(lockstep::GroupKind::dp_cp);
  return stage.forward(own::make_batch(data_ranks, 2 * input.step + input.microbatch),
                       input.hidden);
}

bool report(const char* what, bool ok, const std::string& text) {
  std::printf("%s: %s\n%s", what, ok ? "good" : "BAD", text.c_str());
  return ok;
}

}  // namespace

int main() {
  const RankLayout one = {};
  const RankLayout tp = {.ranks = 2, .sizes = {.tensor = 2}};
  const RankLayout sp = {.ranks = 3, .sizes = {.tensor = 3}, .sequence_parallel = true};
  const RankLayout tp_sp = {.ranks = 2, .sizes = {.tensor = 2}, .sequence_parallel = true};
  const RankLayout pp = {.ranks = 2, .sizes = {.pipeline = 2}};
  const RankLayout deep = {.ranks = 4, .sizes = {.pipeline = 4}};
  const RankLayout dp = {.ranks = 2};
  const RankLayout dp_tp = {.ranks = 4, .sizes = {.tensor = 2}};
  const RankLayout ep = {.ranks = 2, .sizes = {.expert = 2}};
  const RankLayout ep_only = {.ranks = 4, .sizes = {.expert = 4}};
  const RankLayout all = {
      .ranks = 8, .sizes = {.tensor = 2, .pipeline = 2, .expert = 2}, .sequence_parallel = true};
  CheckOptions options;
  options.optimizer = own::optimizer_config();
  options.rule = std::make_shared<own::SoftSign>();
  bool ok = true;

  for (const bool sharded : {false, true}) {
    options.ddp.use_distributed_optimizer = sharded;
    const LayoutReport layouts =
        check_layouts(make, loss, {tp, sp, tp_sp, pp, deep, dp, dp_tp, ep, ep_only, all}, options);
    ok = report(sharded ? "layouts, distributed optimizer" : "layouts", layouts.ok(),
                to_string(layouts)) &&
         ok;
  }

  const lockstep::ParallelContext alone = {.options = at::kDouble};
  own::Stage whole(alone);
  const at::Tensor tokens = own::make_batch(alone.state.group(lockstep::GroupKind::dp_cp), 0);
  const GradientReport gradients =
      check_gradients(whole, [&] { return whole.forward(tokens, {}); });
  ok = report("gradients", gradients.ok(), to_string(gradients)) && ok;

  for (const RankLayout& layout : {all, one}) {
    const CheckpointReport checkpoint = check_checkpoint(make, loss, all, layout, options);
    ok = report("checkpoint", checkpoint.ok(), to_string(checkpoint)) && ok;
  }

  // For each micro-batch: forward and backward of two regions of each block; the embedding, the
  // logits and the losses.
  const StepCommunication step = communication_of_step(make, loss, tp, options);
  const int64_t sums = options.microbatches * (4 * own::kBlocks + 3);
  ok = report("communication", step.total(0, "all_reduce (sum)", "tp").calls == sums,
              to_string(step, 0)) &&
       ok;
  return ok ? 0 : 1;
}
