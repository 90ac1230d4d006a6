#include "lockstep/training/step_trials.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "lockstep/core/config_io.h"
#include "lockstep/parallel_state/job_program.h"
#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/planner/time_simulation.h"
#include "lockstep/training/planned_job.h"
#include "lockstep/training/stop_watch.h"
#include "lockstep/training/trainer.h"

namespace lockstep {
namespace {

Config trial_of(const std::string& model) {
  return parse_config(
      "model { num_layers: 2 hidden_size: 32 num_attention_heads: 2 ffn_hidden_size: 64 "
      "seq_length: 16 vocab_size: 256 " +
          model +
          " } train { micro_batch_size: 1 global_batch_size: 4 eval_iters: 0 device: \"cpu\" } "
          "data { mock: true }",
      "calibration");
}

}  // namespace

std::vector<Config> step_trials() {
  return {trial_of("activation: \"swiglu\" normalization: \"RMSNorm\""),
          trial_of("activation: \"gelu\" normalization: \"LayerNorm\" add_bias_linear: true")};
}

double step_seconds(const Config& config, double seconds) {
  Trainer trainer(config, ParallelState::single_process());
  return median_seconds(seconds, [&] { trainer.train_step(); });
}

double launch_seconds_of(const std::vector<double>& measured, Machine machine, double least) {
  double without = 0, launches = 0;
  for (const Config& config : step_trials()) {
    const JobProgram job = record_job(config, 1, /*kernels=*/true);
    machine.launch_s = 0;
    const double kernels = simulate_step(job, machine).step_s;
    machine.launch_s = 1;
    without += kernels;
    launches += simulate_step(job, machine).step_s - kernels;
  }
  const double all = std::accumulate(measured.begin(), measured.end(), 0.0);
  return std::max(least, (all - without) / launches);
}

}  // namespace lockstep
