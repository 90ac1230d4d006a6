#include "lockstep/training/supported_config.h"

#include "lockstep/core/check.h"
#include "lockstep/core/expert_rules.h"
#include "lockstep/core/fp8_rules.h"
#include "lockstep/core/lora_rules.h"
#include "lockstep/core/optimizer_rules.h"
#include "lockstep/core/unusable_sizes.h"
#include "lockstep/datasets/tokenizer.h"
#include "lockstep/planner/pipeline_plan.h"
#include "lockstep/planner/stage_shapes.h"

namespace lockstep {
namespace {

void check_cuda_graph(const Config& config) {
  const CudaGraph graph = config.train.cuda_graph;
  if (graph == CudaGraph::none) return;
  const auto check = [&](bool allowed, std::string_view field, std::string_view what) {
    require<ConfigError>(allowed, "train.cuda_graph = {}: found {}, allowed: {}", to_string(graph),
                         field, what);
  };
  const bool step = graph == CudaGraph::step;
  check(config.train.device != DeviceChoice::cpu, "train.device = cpu", "auto, cuda");
  check(config.parallel.pipeline_model_parallel_size == 1,
        "parallel.pipeline_model_parallel_size > 1", "1");
  check(!config.model.num_experts, "model.num_experts", "a dense model");
  check(step || !config.ddp.allow_unused_parameters, "ddp.allow_unused_parameters", "false");
  check(!config.ddp.check_for_nan_in_grad, "ddp.check_for_nan_in_grad", "false");
  check(!step || !config.ddp.check_for_large_grads, "ddp.check_for_large_grads", "false");
  check(!step || !scale_adapts_itself(config), "a dynamic loss scale",
        "bf16, fp32, fp64, or optimizer.loss_scale");
  // Each micro-batch has another list of attention blocks.
  check(!config.data.reset_attention_mask, "data.reset_attention_mask", "false");
  // With a mean, the number of tokens becomes part of the graph.
  check(!config.data.eod_mask_loss || divides_by_labels(config.ddp),
        "data.eod_mask_loss with ddp.calculate_per_token_loss = false",
        "ddp.calculate_per_token_loss = true");
  check(config.train.task != TrainTask::sft, "train.task = sft", "pretrain");
  check(!step || config.optimizer.optimizer != OptimizerKind::muon, "optimizer.optimizer = muon",
        "adam, sgd");
}

/// A loss scale that adapts finds its value by overflows, which such a check would end the run at.
void check_gradient_checks(const Config& config) {
  if (!scale_adapts_itself(config)) return;
  const auto check = [](const char* field, bool found) {
    require<ConfigError>(!found,
                         "{}: found true, allowed with train.precision = fp16: false, or a fixed "
                         "optimizer.loss_scale, because a dynamic loss scale makes gradients "
                         "overflow",
                         field);
  };
  check("ddp.check_for_nan_in_grad", config.ddp.check_for_nan_in_grad);
  check("ddp.check_for_large_grads", config.ddp.check_for_large_grads);
}

/// A stage without layers would have nothing to train.
void check_adapters(const Config& config) {
  if (!config.lora.rank) return;
  for (int64_t stage = 0; stage < config.parallel.pipeline_model_parallel_size; ++stage)
    for (const ModelChunk& chunk : chunks_of_stage(config, stage))
      require<ConfigError>(chunk.num_layers > 0,
                           "lora.rank: found pipeline stage {} without layers, allowed: layers on "
                           "every stage",
                           stage);
}

/// Earlier versions ignored it, so parse_config() accepts it. With one chunk by choice it is a
/// setting for other layouts.
void check_microbatch_group(const ParallelConfig& parallel) {
  require<ConfigError>(
      !parallel.microbatch_group_size_per_vp_stage || parallel.virtual_pipeline_model_parallel_size,
      "parallel.microbatch_group_size_per_vp_stage: found {}, allowed without "
      "parallel.virtual_pipeline_model_parallel_size: unset, because each rank "
      "has one chunk",
      parallel.microbatch_group_size_per_vp_stage.value_or(0));
}

}  // namespace

void check_supported(const Config& config) {
  stage_layout(config);
  refuse_unusable_sizes([&] { (void)num_parameters(config), (void)local_widths(config); });
  check_experts_in_use(config.model);
  check_decoupled_lr_in_use(config);
  check_microbatch_group(config.parallel);
  check_fp8_in_use(config);
  check_adapters(config);
  check_tokenizer_name(config.data.tokenizer, "data.tokenizer");
  require<ConfigError>(
      config.data.tokenizer != "byte" || config.model.vocab_size >= ByteTokenizer::kBytes,
      "model.vocab_size: found {}, allowed with data.tokenizer = byte: >= {}",
      config.model.vocab_size, ByteTokenizer::kBytes);
  require<ConfigError>(config.train.task != TrainTask::sft || config.data.tokenizer != "byte" ||
                           config.model.vocab_size > ByteTokenizer::kBytes,
                       "model.vocab_size: found {}, allowed with train.task = sft and "
                       "data.tokenizer = byte: > {}, the end of a document",
                       config.model.vocab_size, ByteTokenizer::kBytes);
  check_cuda_graph(config);
  check_gradient_checks(config);
  check_replay(config.train, config.train.device == DeviceChoice::cuda);
}

void check_replay(const TrainConfig& train, bool on_gpu) {
  require<ConfigError>(!train.replay_interval || train.deterministic || !on_gpu,
                       "train.deterministic: found false, allowed with train.replay_interval on a "
                       "GPU: true, because other kernels need not give the same bits twice");
}

}  // namespace lockstep
