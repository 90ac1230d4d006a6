#include "lockstep/core/config_rules.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <sstream>
#include <utility>

#include "lockstep/core/attention_rules.h"
#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/context_parallel_rules.h"
#include "lockstep/core/expert_rules.h"
#include "lockstep/core/field_names.h"
#include "lockstep/core/fp8_rules.h"
#include "lockstep/core/integers.h"
#include "lockstep/core/lora_rules.h"
#include "lockstep/core/optimizer_rules.h"
#include "lockstep/core/tensor_parallel_rules.h"
#include "lockstep/core/unusable_sizes.h"

namespace lockstep {
namespace {

void check_model(const TransformerConfig& model) {
  if (model.recompute_num_layers) {
    require<ConfigError>(model.recompute_granularity == RecomputeGranularity::full,
                         "model.recompute_num_layers: found {}, but model.recompute_granularity is "
                         "{}; it must be full",
                         *model.recompute_num_layers, to_string(model.recompute_granularity));
    require<ConfigError>(*model.recompute_num_layers <= model.num_layers,
                         "model.recompute_num_layers: found {}, allowed: <= model.num_layers ({})",
                         *model.recompute_num_layers, model.num_layers);
  }
  require<ConfigError>(model.label_smoothing == 0 || model.vocab_size > 1,
                       "model.label_smoothing: found {}, allowed with model.vocab_size = 1: 0",
                       model.label_smoothing);
}

void check_parallel(const ParallelConfig& parallel) {
  require<ConfigError>(
      !parallel.virtual_pipeline_model_parallel_size || parallel.pipeline_model_parallel_size > 1,
      "parallel.virtual_pipeline_model_parallel_size: found {}, which needs "
      "parallel.pipeline_model_parallel_size > 1 (found {})",
      parallel.virtual_pipeline_model_parallel_size.value_or(0),
      parallel.pipeline_model_parallel_size);
  const double timeout = parallel.distributed_timeout_seconds.value_or(kShortestTimeout);
  require<ConfigError>(timeout >= kShortestTimeout && timeout <= kLongestTimeout,
                       "parallel.distributed_timeout_seconds: found {}, allowed: {} to {:.0f} (100 "
                       "years)",
                       timeout, kShortestTimeout, kLongestTimeout);
}

void check_learning_rate(const OptimizerConfig& optimizer, const FieldNames& names) {
  require<ConfigError>(optimizer.min_lr <= optimizer.lr,
                       "optimizer.min_lr: found {}, allowed: <= optimizer.lr ({})",
                       optimizer.min_lr, optimizer.lr);
  require<ConfigError>(optimizer.lr_warmup_init <= optimizer.lr,
                       "optimizer.lr_warmup_init: found {}, allowed: <= optimizer.lr ({})",
                       optimizer.lr_warmup_init, optimizer.lr);
  const auto& decay_iters = optimizer.lr_decay_iters;
  require<ConfigError>(!decay_iters || optimizer.lr_warmup_iters < *decay_iters,
                       "optimizer.lr_warmup_iters: found {}, allowed: < {} ({})",
                       optimizer.lr_warmup_iters, names.lr_decay_iters, decay_iters.value_or(0));
  if (optimizer.lr_decay_style != LrDecayStyle::WSD) return;
  require<ConfigError>(optimizer.lr_wsd_decay_iters.has_value(),
                       "optimizer.lr_wsd_decay_iters: not set, but optimizer.lr_decay_style = WSD "
                       "needs it");
  require<ConfigError>(!decay_iters || *optimizer.lr_wsd_decay_iters <= *decay_iters,
                       "optimizer.lr_wsd_decay_iters: found {}, allowed: <= {} ({})",
                       *optimizer.lr_wsd_decay_iters, names.lr_decay_iters,
                       decay_iters.value_or(0));
}

/// The message names the end of the schedule, or its start if only that is set (`names_start`).
void check_weight_decay(const OptimizerConfig& optimizer, const FieldNames& names,
                        bool names_start) {
  const double start = *optimizer.start_weight_decay, end = *optimizer.end_weight_decay;
  const bool constant = optimizer.weight_decay_incr_style == WeightDecayIncrStyle::constant;
  const char* const relation = constant ? "=" : names_start ? "<=" : ">=";
  require<ConfigError>(
      constant ? start == end : start <= end,
      "{}: found {}, allowed with optimizer.weight_decay_incr_style = {}: {} {} ({})",
      names_start ? names.start_weight_decay : names.end_weight_decay, names_start ? start : end,
      to_string(optimizer.weight_decay_incr_style), relation,
      names_start ? names.end_weight_decay : names.start_weight_decay, names_start ? end : start);
}

/// The numbers between the separators; nullopt if one of them is not a number. Spaces around them
/// and a separator at the end do not count.
template <class T>
std::optional<std::vector<T>> parse_numbers(const std::string& text, char separator) {
  std::vector<T> numbers;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, separator);) {
    part.erase(0, part.find_first_not_of(' '));
    part.erase(part.find_last_not_of(' ') + 1);
    if (part.empty() && separator == ' ') continue;
    T number = 0;
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), number);
    if (error != std::errc() || end != part.data() + part.size()) return std::nullopt;
    numbers.push_back(number);
  }
  return numbers;
}

bool all_shares(const std::vector<double>& shares) {
  return std::all_of(shares.begin(), shares.end(),
                     [](double share) { return std::isfinite(share) && share >= 0; });
}

void check_batch_sizes(const TrainConfig& train) {
  if (train.rampup_batch_size) parse_rampup_batch_size(*train.rampup_batch_size);
  if (!train.step_batch_size_schedule) return;
  parse_step_batch_size_schedule(*train.step_batch_size_schedule);
  require<ConfigError>(!train.global_batch_size && !train.rampup_batch_size,
                       "train.step_batch_size_schedule: found '{}', allowed without "
                       "train.global_batch_size and train.rampup_batch_size",
                       *train.step_batch_size_schedule);
}

void check_replay(const Config& config) {
  if (!config.train.replay_interval) return;
  const auto check = [&](bool allowed, std::string_view found, std::string_view what) {
    require<ConfigError>(allowed, "train.replay_interval = {}: found {}, allowed: {}",
                         *config.train.replay_interval, found, what);
  };
  check(!config.model.num_experts, "model.num_experts, whose ranks compute together", "unset");
  check(!config.parallel.virtual_pipeline_model_parallel_size,
        "parallel.virtual_pipeline_model_parallel_size, which needs several micro-batches",
        "unset");
  const ShardingStrategy strategy = config.ddp.data_parallel_sharding_strategy;
  check(strategy == ShardingStrategy::no_shard || strategy == ShardingStrategy::optim,
        fmt::format("ddp.data_parallel_sharding_strategy = {}", to_string(strategy)),
        "no_shard, optim");
}

void check_checkpoint(const Config& config) {
  const int64_t replicas = config.checkpoint.in_memory_replicas;
  require<ConfigError>(
      replicas == 0 || config.train.elastic == Elastic::dp,
      "checkpoint.in_memory_replicas: found {}, and train.elastic = {}; allowed: 0, or dp, because "
      "only surviving ranks can resume from copies in memory",
      replicas, to_string(config.train.elastic));
}

void check_spikes(const Config& config) {
  const TrainConfig& train = config.train;
  const CheckpointConfig& checkpoint = config.checkpoint;
  const auto check = [&](bool allowed, std::string_view found, std::string_view what) {
    require<ConfigError>(allowed, "train.on_spike = {}: found {}, allowed: {}",
                         to_string(train.on_spike), found, what);
  };
  if (train.on_spike == OnSpike::none) return;
  check(train.cuda_graph != CudaGraph::step, "train.cuda_graph = step", "none, microbatch");
  if (train.on_spike != OnSpike::rewind) return;
  check(checkpoint.save_interval.has_value(), "checkpoint.save_interval that is unset",
        "an interval, after which there is a checkpoint to go back to");
  check(checkpoint.save_optim, "checkpoint.save_optim = false", "true");
  check(!has_changing_batch(train), "train.rampup_batch_size or train.step_batch_size_schedule",
        "global batches of one size");
}

void check_data(const DataConfig& data) {
  const char* const beside_mock = !data.valid_path.empty()  ? "data.valid_path"
                                  : !data.test_path.empty() ? "data.test_path"
                                  : data.blend              ? "data.blend"
                                                            : nullptr;
  require<ConfigError>(!data.mock || beside_mock == nullptr,
                       "data.mock: found true, allowed: false beside {}", beside_mock);
  const char* const of_documents = data.reset_position_ids     ? "data.reset_position_ids"
                                   : data.reset_attention_mask ? "data.reset_attention_mask"
                                   : data.eod_mask_loss        ? "data.eod_mask_loss"
                                                               : nullptr;
  require<ConfigError>(!data.mock || of_documents == nullptr,
                       "{}: found true, allowed with data.mock: false, because its sequences have "
                       "no documents",
                       of_documents);
  require<ConfigError>(data.test_path.empty() || !data.valid_path.empty(),
                       "data.test_path: found '{}', allowed beside data.valid_path, which is not "
                       "set",
                       fmt::join(data.test_path, ", "));
  require<ConfigError>(data.valid_path.empty() || !data.split,
                       "data.split: found '{}', allowed with data.valid_path: unset, because all "
                       "of data.path is then used for training",
                       data.split.value_or(""));
  parse_split(split_of(data));
  if (data.blend) parse_blend(*data.blend, data.path.size());
}

/// The rules for train.task = sft.
void check_conversations(const DataConfig& data) {
  const auto refuse_where = [](bool found, std::string_view what, std::string_view allowed) {
    require<ConfigError>(!found, "{}, allowed with train.task = sft: {}", what, allowed);
  };
  refuse_where(data.mock, "data.mock: found true", "false");
  refuse_where(data.blend.has_value(),
               fmt::format("data.blend: found '{}'", data.blend.value_or("")), "none");
  const char* const apart =
      "false, because conversations are kept separate and prompts have no "
      "loss";
  refuse_where(data.reset_position_ids, "data.reset_position_ids: found true", apart);
  refuse_where(data.reset_attention_mask, "data.reset_attention_mask: found true", apart);
  refuse_where(data.eod_mask_loss, "data.eod_mask_loss: found true", apart);
  require<ConfigError>(data.tokenizer != "byte" || data.chat_template == ChatTemplate::plain,
                       "data.chat_template: found {}, allowed with data.tokenizer = byte, which "
                       "has no role tokens: plain",
                       to_string(data.chat_template));
}

/// All runs but those in fp64 compute with them in fp32.
void check_epsilons(const Config& config) {
  if (config.train.precision == Precision::fp64) return;
  const std::pair<const char*, double> fields[] = {
      {"model.layernorm_epsilon", config.model.layernorm_epsilon},
      {"optimizer.adam_eps", config.optimizer.adam_eps}};
  for (const auto& [name, value] : fields)
    require<ConfigError>(static_cast<float>(value) > 0,
                         "{}: found {}, which is 0 in fp32; allowed with train.precision = {}: at "
                         "least 1e-45",
                         name, value, to_string(config.train.precision));
}

}  // namespace

void check_rules(const Config& given) {
  const Config config = resolve(given);
  const FieldNames names(given);
  check_attention(config.model, names);
  check_model(config.model);
  check_parallel(config.parallel);
  refuse_unusable_sizes([&] {
    check_tensor_parallel(config.model, config.parallel, names);
    check_context_parallel(config.model, config.parallel, names);
    check_experts(config.model, config.parallel, names);
  });
  check_ddp(config.ddp);
  check_optimizer(config);
  check_epsilons(config);
  require<ConfigError>(
      !config.model.offload_activations || config.train.cuda_graph == CudaGraph::none,
      "model.offload_activations: found true, and train.cuda_graph = {}; allowed: false, or "
      "cuda_graph = none",
      to_string(config.train.cuda_graph));
  require<ConfigError>(config.parallel.num_distributed_optimizer_instances == 1 ||
                           config.ddp.use_distributed_optimizer,
                       "parallel.num_distributed_optimizer_instances: found {}, allowed: 1, or "
                       "ddp.use_distributed_optimizer = true",
                       config.parallel.num_distributed_optimizer_instances);
  check_learning_rate(config.optimizer, names);
  check_weight_decay(config.optimizer, names,
                     given.optimizer.start_weight_decay && !given.optimizer.end_weight_decay);
  check_data(config.data);
  if (config.train.task == TrainTask::sft) check_conversations(config.data);
  check_lora(config);
  refuse_unusable_sizes([&] { check_fp8(config); });
  check_batch_sizes(config.train);
  check_checkpoint(config);
  check_spikes(config);
  check_replay(config);
  require<ConfigError>(config.train.sample_tokens == 0 || !config.train.sample_prompt.empty(),
                       "train.sample_prompt: is empty, allowed: at least one byte");
}

std::string split_of(const DataConfig& data) {
  return data.split.value_or(data.valid_path.empty() ? "90,10" : "1,0");
}

std::vector<double> parse_split(const std::string& split) {
  const auto parsed = parse_numbers<double>(split, ',');
  std::vector<double> shares = parsed.value_or(std::vector<double>());
  const bool right_number = shares.size() == 2 || shares.size() == 3;
  shares.resize(3, 0.0);
  const double total = shares[0] + shares[1] + shares[2];
  require<ConfigError>(right_number && all_shares(shares) && shares[0] > 0 && std::isfinite(total),
                       "data.split: found '{}', allowed: two or three shares with a finite sum, as "
                       "in 90,10; the first, training, more than 0",
                       split);
  for (double& share : shares) share /= total;
  return shares;
}

std::vector<double> parse_blend(const std::string& blend, size_t paths) {
  const auto parsed = parse_numbers<double>(blend, ',');
  const bool good = parsed && parsed->size() == paths && all_shares(*parsed) &&
                    std::all_of(parsed->begin(), parsed->end(), [](double w) { return w > 0; });
  require<ConfigError>(good,
                       "data.blend: found '{}', allowed: a weight > 0 for each of the {} paths of "
                       "data.path, as in 0.3,0.7",
                       blend, paths);
  return *parsed;
}

bool has_changing_batch(const TrainConfig& train) {
  return train.rampup_batch_size || train.step_batch_size_schedule;
}

BatchRampUp parse_rampup_batch_size(const std::string& text) {
  const auto parsed = parse_numbers<int64_t>(text, ' ');
  const bool good = parsed && parsed->size() == 3 &&
                    std::all_of(parsed->begin(), parsed->end(), [](int64_t n) { return n >= 1; });
  require<ConfigError>(good,
                       "train.rampup_batch_size: found '{}', allowed: START INCREMENT SAMPLES, "
                       "three integers of at least 1, as in 32 32 100000",
                       text);
  return {(*parsed)[0], (*parsed)[1], (*parsed)[2]};
}

std::vector<BatchStep> parse_step_batch_size_schedule(const std::string& text) {
  std::vector<BatchStep> steps;
  std::istringstream parts(text);
  bool good = true;
  for (std::string part; good && parts >> part;) {
    const auto numbers = parse_numbers<int64_t>(part, ':');
    good = numbers && numbers->size() == 2 && (*numbers)[1] >= 1 &&
           (steps.empty() ? (*numbers)[0] == 0 : (*numbers)[0] > steps.back().samples);
    if (good) steps.push_back({(*numbers)[0], (*numbers)[1]});
  }
  require<ConfigError>(good && !steps.empty(),
                       "train.step_batch_size_schedule: found '{}', allowed: SAMPLES:BATCH pairs, "
                       "SAMPLES from 0 upwards, BATCH at least 1, as in 0:32 100000:64",
                       text);
  return steps;
}

Config resolve_for_device(Config config, bool is_cpu) {
  auto& multiple = config.model.make_vocab_size_divisible_by;
  auto& timeout = config.parallel.distributed_timeout_seconds;
  if (!multiple) multiple = is_cpu ? 1 : 128;
  if (!timeout) timeout = is_cpu ? 60 : 600;
  return config;
}

Config resolve(Config config) {
  TransformerConfig& model = config.model;
  if (!model.num_query_groups) model.num_query_groups = model.num_attention_heads;
  if (!model.kv_channels)
    model.kv_channels = model.multi_latent_attention
                            ? latent_query_channels(model)
                            : div_exact(model.hidden_size, model.num_attention_heads,
                                        "model.hidden_size", "model.num_attention_heads");
  if (!model.ffn_hidden_size) {
    constexpr int64_t kLargest = std::numeric_limits<int64_t>::max() / 4;
    require<ConfigError>(model.hidden_size <= kLargest,
                         "model.hidden_size: found {}, allowed without model.ffn_hidden_size, "
                         "which is then four times as large: <= {}",
                         model.hidden_size, kLargest);
    model.ffn_hidden_size = 4 * model.hidden_size;
  }
  if (!model.moe_ffn_hidden_size) model.moe_ffn_hidden_size = model.ffn_hidden_size;
  if (!model.recompute_num_layers && model.recompute_granularity == RecomputeGranularity::full)
    model.recompute_num_layers =
        model.recompute_method == RecomputeMethod::block ? model.num_layers : 1;
  if (config.lora.rank && config.lora.target_modules.empty())
    config.lora.target_modules = default_lora_targets();
  if (model.moe_layer_freq.empty()) model.moe_layer_freq = TransformerConfig().moe_layer_freq;
  config.ddp.calculate_per_token_loss = divides_by_labels(config.ddp);
  if (config.data.valid_path.empty()) config.data.split = split_of(config.data);
  OptimizerConfig& optimizer = config.optimizer;
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  if (!optimizer.lr_decay_iters && !has_changing_batch(config.train))
    optimizer.lr_decay_iters =
        std::max(config.train.train_iters, std::min(optimizer.lr_warmup_iters, kMost - 1) + 1);
  if (!optimizer.start_weight_decay) optimizer.start_weight_decay = optimizer.weight_decay;
  if (!optimizer.end_weight_decay) optimizer.end_weight_decay = optimizer.weight_decay;
  const DeviceChoice device = config.train.device;
  if (device == DeviceChoice::auto_) return config;
  return resolve_for_device(config, device == DeviceChoice::cpu);
}

}  // namespace lockstep
