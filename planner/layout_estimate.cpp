#include "lockstep/planner/layout_estimate.h"

#include <algorithm>

#include "lockstep/core/expert_rules.h"
#include "lockstep/core/integers.h"
#include "lockstep/planner/activation_plan.h"
#include "lockstep/planner/config_grids.h"
#include "lockstep/planner/model_flops.h"
#include "lockstep/planner/stage_shapes.h"

namespace lockstep {
namespace {

using Kind = CollectiveOperation::Kind;

constexpr double kProducts = 4;         // matrix products in a layer's forward
constexpr double kPasses = 10;          // passes of a forward's operators over the residual stream
constexpr double kKernels = 16;         // kernels in a layer's forward
constexpr double kGradientBytes = 4;    // per element if gradients are reduced in fp32
constexpr double kOptimizerBytes = 28;  // that AdamW reads and writes per element
constexpr double kCovered = 0.8;        // share of a pass during which collectives run

double real(int64_t number) { return static_cast<double>(number); }

bool same_groups(const JobLayout& a, const JobLayout& b) {
  return a.tensor == b.tensor && a.context == b.context && a.pipeline == b.pipeline &&
         a.chunks == b.chunks && a.expert == b.expert && a.expert_tensor == b.expert_tensor;
}

/// Bytes of optimizer state per element in device memory.
double state_bytes(const Config& config) {
  if (config.optimizer.offload && config.train.device == DeviceChoice::cuda) return 0;
  const auto moment = [](StateDtype dtype) { return dtype == StateDtype::bf16 ? 2.0 : 4.0; };
  const bool adam = config.optimizer.optimizer == OptimizerKind::adam;
  const double moments =
      adam ? moment(config.optimizer.exp_avg_dtype) + moment(config.optimizer.exp_avg_sq_dtype) : 0;
  const bool has_master =
      config.train.precision == Precision::bf16 || config.train.precision == Precision::fp16;
  return moments + (has_master ? 4 : 0);
}

}  // namespace

LayoutEstimator::LayoutEstimator(const Config& config, int64_t world_size, const Machine& machine)
    : config_(config),
      machine_(machine),
      world_size_(world_size),
      element_bytes_(real(element_bytes(config.train.precision))),
      all_parameters_(real(num_parameters(config))) {
  const TransformerConfig& model = config.model;
  const double layers = real(model.num_layers);
  expert_parameters_ = real(num_expert_parameters(config));
  const double output = 2 * real(model.hidden_size) * real(model.vocab_size);
  attention_flops_ =
      4 * real(model.num_attention_heads) * real(*model.kv_channels) * visible_tokens(model);
  layer_flops_ =
      std::max(0.0, (model_flops_per_token(config) / 3 - output) / layers - attention_flops_);
}

double LayoutEstimator::kernel(const char* name, double flops, double bytes) const {
  const char* dtype = config_.train.precision == Precision::fp32   ? "Float"
                      : config_.train.precision == Precision::fp64 ? "Double"
                      : config_.train.precision == Precision::fp16 ? "Half"
                                                                   : "BFloat16";
  return machine_.seconds(
      {.name = name, .dtype = dtype, .flops = flops, .bytes = static_cast<int64_t>(bytes)});
}

double LayoutEstimator::transfer(Kind kind, double bytes, const RankList& ranks) const {
  if (ranks.size() < 2) return 0;
  ProgramCall call;
  call.operation.kind = kind;
  call.operation.position = 1;  // the neighbour, for messages
  call.bytes = static_cast<int64_t>(bytes);
  return machine_.transfer(call, ranks, 0).seconds;
}

LayoutEstimator::Shape LayoutEstimator::make_shape(const JobLayout& layout) const {
  Config config = config_;
  ParallelConfig& parallel = config.parallel;
  parallel.tensor_model_parallel_size = layout.tensor;
  parallel.context_parallel_size = layout.context;
  parallel.pipeline_model_parallel_size = layout.pipeline;
  parallel.virtual_pipeline_model_parallel_size.reset();
  parallel.expert_model_parallel_size = layout.expert;
  parallel.expert_tensor_parallel_size = layout.expert_tensor;
  parallel.num_distributed_optimizer_instances = 1;
  const RankGrids grids = config_grids(parallel, world_size_);
  Shape shape;
  shape.sizes = layout;
  shape.tensor = grids.group(GroupKind::tp, 0);
  shape.context = grids.group(GroupKind::cp, 0);
  shape.expert = grids.group(GroupKind::ep, 0);
  shape.pipeline = grids.group(GroupKind::pp, 0);
  const RankList replicas = grids.group(GroupKind::dp_cp, 0);
  shape.replicas = static_cast<int64_t>(replicas.size());
  shape.data_parallel = grids.data_parallel_size();
  const double table = real(config_.model.hidden_size) * real(config_.model.vocab_size);
  const double dense = all_parameters_ - expert_parameters_ - table;
  const double others = (dense / real(layout.pipeline) + table) / real(layout.tensor);
  const double experts =
      expert_parameters_ / real(layout.pipeline * layout.expert * layout.expert_tensor);
  shape.parameters = others + experts;
  const auto over_replicas = [&](Kind kind, double element_bytes) {
    const auto seconds = [&](double parameters, const RankList& ranks) {
      const double shards = kind == Kind::all_gather ? real(static_cast<int64_t>(ranks.size())) : 1;
      return transfer(kind, parameters * element_bytes / shards, ranks);
    };
    return seconds(others, replicas) +
           (experts > 0 ? seconds(experts, grids.group(GroupKind::expert_dp, 0)) : 0);
  };
  const double gradient_bytes =
      config_.ddp.grad_reduce_in_fp32 ? std::max(kGradientBytes, element_bytes_) : element_bytes_;
  shape.reduce = over_replicas(Kind::all_reduce, gradient_bytes);
  shape.scatter = over_replicas(Kind::reduce_scatter, gradient_bytes);
  shape.gather = over_replicas(Kind::all_gather, element_bytes_);
  return shape;
}

const LayoutEstimator::Shape& LayoutEstimator::shape_of(const JobLayout& layout) {
  if (!shape_ || !same_groups(shape_->sizes, layout)) shape_ = make_shape(layout);
  return *shape_;
}

LayoutEstimator::Layer LayoutEstimator::layer_of(const JobLayout& layout) const {
  const TransformerConfig& model = config_.model;
  const double e = element_bytes_, h = real(model.hidden_size), tp = real(layout.tensor);
  const double t = real(layout.micro_batch_size * model.seq_length) / real(layout.context);
  const double stream = t * h * e;  // of all tokens of the rank's tensor-parallel group
  const double inner = t * real(*model.ffn_hidden_size) * e / tp;
  const double q = t * real(model.num_attention_heads * *model.kv_channels) * e / tp;
  const double k = t * real(*model.num_query_groups * *model.kv_channels) * e / tp;
  Layer layer;
  const double weights = layer_flops_ / 2 * e / tp;
  layer.products = kProducts * kernel("aten::mm", layer_flops_ * t / tp / kProducts,
                                      (weights + 2 * stream + 2 * inner) / kProducts);
  const double parts = real(layout.context);  // keys and values of one rank after the other
  layer.attention = parts * kernel("aten::_scaled_dot_product_flash_attention",
                                   attention_flops_ * t / tp / parts, 2 * q + 2 * k) +
                    (parts - 1) * kernel("aten::mul", 0, 3 * q);
  layer.rest = kPasses * kernel("aten::mul", 0, stream / tp) + 2 * kernel("aten::mul", 0, inner);
  const double launches = kKernels * machine_.launch_s;
  const double kernels = layer.products + layer.attention + layer.rest;
  layer.rest += machine_.synchronous ? launches : std::max(0.0, launches - kernels);
  layer.tensor = 4 * transfer(Kind::all_reduce, stream, shape_->tensor);
  if (layout.context > 1)
    layer.context = 3 * real(layout.context - 1) * transfer(Kind::exchange, 2 * k, shape_->context);
  if (model.num_experts)
    layer.expert =
        4 * transfer(Kind::all_to_all, stream * real(model.moe_router_topk) / tp, shape_->expert);
  return layer;
}

double LayoutEstimator::output_seconds(const JobLayout& layout) const {
  const TransformerConfig& model = config_.model;
  const double tp = real(layout.tensor), h = real(model.hidden_size);
  const double t = real(layout.micro_batch_size * model.seq_length) / real(layout.context);
  const double vocabulary = real(model.vocab_size) / tp;
  const double logits = t * vocabulary * element_bytes_;
  return 3 * kernel("aten::mm", 2 * t * h * vocabulary, logits + t * h * element_bytes_) +
         2 * kernel("aten::mul", 0, 2 * logits);
}

double LayoutEstimator::exposed_over_replicas(const JobLayout& layout, double forward,
                                              double backward, double microbatches) const {
  if (shape_->replicas == 1) return 0;
  const double covered = kCovered * backward;
  if (layout.sharding == ShardingStrategy::no_shard)
    return std::max(shape_->reduce - covered, shape_->reduce / 10);
  const double scatter = std::max(shape_->scatter - covered, shape_->scatter / 10);
  const double gather = std::max(0.0, shape_->gather - kCovered * forward);
  if (layout.sharding != ShardingStrategy::optim_grads_params) return scatter + gather;
  // Gathered for each forward and each backward.
  return scatter + microbatches * (gather + std::max(0.0, shape_->gather - covered));
}

double LayoutEstimator::least_bytes(const JobLayout& layout) const {
  if (config_.lora.rank) return 0;  // the optimizer has no frozen weights
  const bool shards_weights = layout.sharding == ShardingStrategy::optim_grads_params;
  const bool shards_grads = shards_weights || layout.sharding == ShardingStrategy::optim_grads;
  const bool shards_state = layout.sharding != ShardingStrategy::no_shard;
  const double state = state_bytes(config_);
  // The bytes of parameters that are cut into `parts` on each stage; the other ranks hold replicas.
  const auto bytes = [&](double parameters, int64_t parts) {
    const double replicas = real(world_size_ / layout.pipeline / parts);
    const auto share = [&](bool shards) { return shards ? 1 / replicas : 1; };
    return parameters / real(layout.pipeline * parts) *
           (element_bytes_ * (share(shards_weights) + share(shards_grads)) +
            state * share(shards_state));
  };
  return bytes(all_parameters_ - expert_parameters_, layout.tensor) +
         bytes(expert_parameters_, layout.expert * layout.expert_tensor);
}

double LayoutEstimator::seconds(const JobLayout& layout) {
  const Shape& shape = shape_of(layout);
  const Layer layer = layer_of(layout);
  const double layers = real(ceil_div(config_.model.num_layers, layout.pipeline));
  const double core = layer.attention, others = layer.products + layer.rest;
  const double again = layout.recompute == RecomputeGranularity::full        ? core + others
                       : layout.recompute == RecomputeGranularity::selective ? core
                                                                             : 0;
  const double tensor = layer.tensor * (layout.recompute == RecomputeGranularity::full ? 1.5 : 1);
  const double communication =
      tensor + layer.expert + std::max(0.0, layer.context - 3.5 * layer.attention);
  const double forward = layers * (core + others + communication / 3);
  const double backward = layers * (2.5 * core + 2 * others + again + 2 * communication / 3);
  const double output = output_seconds(layout);
  const double microbatches =
      real(*config_.train.global_batch_size) / real(layout.micro_batch_size * shape.data_parallel);
  double idle = 0;  // micro-batches for which the pipeline idles
  if (layout.pipeline > 1)
    idle = real(layout.pipeline - 1) / real(layout.chunks) /
           (layout.schedule == PipelineScheduleFamily::zb_h1 ? 3 : 1);
  const double stream = real(layout.micro_batch_size * config_.model.seq_length) *
                        real(config_.model.hidden_size) * element_bytes_ /
                        real(layout.context * layout.tensor);
  const double messages = 2 * (real(layout.pipeline - 1) + microbatches * real(layout.chunks - 1)) *
                          transfer(Kind::send, stream, shape.pipeline);
  const double shards =
      layout.sharding == ShardingStrategy::no_shard ? 1 : real(shape.replicas / layout.instances);
  const double update = kernel("adamw", 0, shape.parameters / shards * kOptimizerBytes) +
                        kernel("sum_of_squares", 0, shape.parameters / shards * kGradientBytes);
  const double busy = microbatches * (forward + backward + output) + messages + update +
                      exposed_over_replicas(layout, forward, backward, microbatches);
  const double seconds = busy + idle * (forward + backward);
  if (machine_.cores == 0) return seconds;
  // Ranks that idle leave their core to the others.
  return std::max(seconds, busy * real(world_size_) / real(machine_.cores));
}

}  // namespace lockstep
