#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "lockstep/core/config_io.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/trainer.h"

/// Short runs of the reference GPT on any layout, for tests of their measurements.
namespace lockstep::testing {

using Settings = std::vector<std::string>;

struct TelemetryLayout {
  std::string name;
  int64_t world = 1;
  Settings settings;
};

inline const std::vector<TelemetryLayout>& telemetry_layouts() {
  static const std::vector<TelemetryLayout> layouts = {
      {"one", 1, {}},
      {"dp3", 3, {"train.global_batch_size=12"}},
      {"dp2_sharded", 2, {"ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true"}},
      {"tp2_sp", 2, {"parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"}},
      {"pp2", 2, {"parallel.pipeline_model_parallel_size=2"}},
      {"pp2_zero_bubble",
       2,
       {"parallel.pipeline_model_parallel_size=2", "parallel.pipeline_schedule=zb-h1"}},
      {"pp2_vpp2_dp2",
       4,
       {"parallel.pipeline_model_parallel_size=2",
        "parallel.virtual_pipeline_model_parallel_size=2"}},
      {"cp2", 2, {"parallel.context_parallel_size=2"}},
      {"ep2", 2, {"parallel.expert_model_parallel_size=2", "model.num_experts=4"}},
  };
  return layouts;
}

class TelemetryRuns {
 public:
  TelemetryRuns() { path_ = folder_.write("text", synthetic_text()); }

  /// Four layers, in double; a batch of 8 in micro-batches of one.
  Config config(const Settings& layout, const Settings& more = {}) const {
    Settings all = {"data.path=" + path_};
    all.insert(all.end(), layout.begin(), layout.end());
    all.insert(all.end(), more.begin(), more.end());
    return parse_config(
        "model { num_layers: 4 hidden_size: 16 num_attention_heads: 4 ffn_hidden_size: 32 "
        "seq_length: 16 vocab_size: 256 } "
        "train { global_batch_size: 8 micro_batch_size: 1 eval_iters: 0 train_iters: 4 "
        "precision: \"fp64\" device: \"cpu\" } "
        "optimizer { lr: 0.01 weight_decay: 0.1 clip_grad: 0.5 lr_decay_style: \"constant\" }",
        "test", all);
  }

  using Change = std::function<void(Trainer& trainer, const ParallelState& state)>;

  /// Metrics that each rank reported of each iteration. `change` is called before the first one.
  static std::vector<std::vector<IterationMetrics>> run(const Config& config, int64_t world,
                                                        CollectiveLog* log = nullptr,
                                                        const Change& change = {}) {
    RankThreadOptions options;
    options.sizes = parallel_options(config, c10::kCPU).sizes;
    options.log = log;
    std::vector<std::vector<IterationMetrics>> told(static_cast<size_t>(world));
    run_ranks(
        world,
        [&](const ParallelState& state) {
          Trainer trainer(config, state);
          if (change) change(trainer, state);
          TrainCallbacks callbacks;
          callbacks.iteration = [&](const IterationMetrics& metrics) {
            told[static_cast<size_t>(state.rank())].push_back(metrics);
          };
          trainer.run(callbacks);
        },
        options);
    return told;
  }

 private:
  TemporaryFolder folder_;
  std::string path_;
};

}  // namespace lockstep::testing
