#include "lockstep/planner/memory_plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"
#include "lockstep/datasets/batch_sizes.h"
#include "lockstep/optimizer/update_statement.h"
#include "lockstep/parallel_state/cpu_traits.h"
#include "lockstep/parallel_state/job_program.h"
#include "lockstep/parallel_state/rank_grids.h"
#include "lockstep/planner/activation_plan.h"
#include "lockstep/planner/buffer_plan.h"
#include "lockstep/planner/config_grids.h"
#include "lockstep/planner/pipeline_plan.h"
#include "lockstep/planner/stage_shapes.h"

namespace lockstep {
namespace {

int64_t times(int64_t count, int64_t bytes) { return checked_mul(count, bytes, "bytes"); }

void add(int64_t& total, int64_t bytes) { total = checked_add(total, bytes, "bytes"); }

/// Of the iterations of a run. ConfigError as for check_layout().
int64_t most_microbatches(const Config& config, int64_t data_parallel_size) {
  int64_t most = 0;
  for (const BatchSizes& batch : BatchSchedule(config.train, data_parallel_size).all()) {
    schedule_options(config, batch.num_microbatches);
    most = std::max(most, batch.num_microbatches);
  }
  return most;
}

/// The data that all stages share.
class Planner {
 public:
  Planner(const Config& config, int64_t world_size, const UpdateStatement* rule)
      : config_(config),
        own_rule_(rule),
        parallel_(config.parallel),
        grids_(config_grids(parallel_, world_size)),
        num_microbatches_(most_microbatches(config, grids_.data_parallel_size())),
        element_(element_bytes(config.train.precision)),
        grad_element_(grad_element_bytes(element_, config.ddp.grad_reduce_in_fp32)) {}

  /// Whether the stage takes at most `bytes`. Activations are planned faster, and often exceed it.
  bool fits(int64_t index, double bytes) const {
    StageMemory activations;
    activations.stage = index;
    add_activations(activations, chunks_of_stage(config_, index));
    const auto takes_more = [&](const StageMemory& memory) {
      return static_cast<double>(memory.total_bytes()) > bytes;
    };
    return !takes_more(activations) && !takes_more(stage(index));
  }

  StageMemory stage(int64_t index) const {
    StageMemory memory;
    memory.stage = index;
    const std::vector<ModelChunk> chunks = chunks_of_stage(config_, index);
    for (size_t c = 0; c < chunks.size(); ++c) {
      add_untrained(memory, chunks[c]);
      add_buffers(
          memory, chunks[c],
          chunk_buffers(config_, grids_, chunks[c], index, static_cast<int64_t>(c), own_rule_));
    }
    add_activations(memory, chunks);
    add_transfers(memory);
    return memory;
  }

 private:
  /// Adds the parameters that are not trained, which lie in no buffer.
  void add_untrained(StageMemory& memory, const ModelChunk& chunk) const {
    for (const ShapedParameter& param : chunk_parameters(config_, chunk)) {
      if (param.trained) continue;
      add(memory.parameters, param.numel());
      add(memory.parameter_bytes, times(param.numel(), element_));
    }
  }

  void add_buffers(StageMemory& memory, const ModelChunk& chunk,
                   const std::vector<PlannedBuffer>& buffers) const {
    std::vector<PlannedBuffer> lent;
    for (size_t i = 0; i < buffers.size();) {
      ReductionLoad load = {.ranks = buffers[i].options.data_parallel_size,
                            .item = grad_element_,
                            .scatters = buffers[i].options.distributed_optimizer};
      const bool lends = buffers[i].lends_grads;
      for (const size_t first = i; i < buffers.size() && buffers[i].kind == buffers[first].kind;
           ++i) {
        add_buffer(memory, buffers[i]);
        note_reductions(load, buffers[i].layout);
        if (buffers[i].lends_grads && buffers[i].layout.numel > 0) lent.push_back(buffers[i]);
      }
      add(memory.communication_bytes,
          adds_in_fp32(load) ? exchange_bytes(load, lends) : reduction_bytes(load));
    }
    std::sort(lent.begin(), lent.end(), [](const PlannedBuffer& a, const PlannedBuffer& b) {
      return a.position < b.position;
    });
    const bool tied = chunk.has_embedding && chunk.has_output &&
                      !config_.model.untie_embeddings_and_output_weights;
    add(memory.gradient_bytes, times(lent_grads(lent), grad_element_));
    std::erase_if(lent, [](const PlannedBuffer& piece) { return !piece.lends_params; });
    add(memory.parameter_bytes, times(lent_params(lent, tied), element_));
  }

  void add_buffer(StageMemory& memory, const PlannedBuffer& buffer) const {
    const int64_t numel = buffer.layout.numel;
    const int64_t shard = numel / buffer.options.data_parallel_size;
    const UpdateStatement rule =
        update_statement(config_.optimizer, buffer.kind.whole_matrices, own_rule_);
    add(memory.parameters, buffer.parameters);
    add(memory.parameter_bytes, times(buffer.lends_params ? shard : numel, element_));
    add(memory.gradient_bytes, times(buffer.lends_grads ? shard : numel, grad_element_));
    const int64_t owned = buffer.options.distributed_optimizer ? shard : numel;
    const bool offloaded = config_.optimizer.offload && on_cuda();
    add(offloaded ? memory.host_bytes : memory.optimizer_bytes,
        times(owned, state_bytes_of_element(rule, element_)));
    if (offloaded) add(memory.host_bytes, times(owned, grad_element_ + element_));
  }

  bool on_cuda() const { return config_.train.device == DeviceChoice::cuda; }

  static void note_reductions(ReductionLoad& load, const ParamLayout& layout) {
    load.count += static_cast<int64_t>(layout.buckets.size());
    for (const ParamLayout::Bucket& bucket : layout.buckets)
      load.largest = std::max(load.largest, bucket.end - bucket.start);
    load.total += layout.numel;
  }

  int64_t reduction_bytes(const ReductionLoad& load) const {
    return on_cuda() || load.count == 0 ? 0 : reduction_scratch_bytes(load);
  }

  /// Whether each rank gets the terms of its shard as they are, see BucketGroup::start_exchange().
  bool adds_in_fp32(const ReductionLoad& load) const {
    return config_.ddp.reduce_scatter_with_fp32_accumulation && load.scatters && load.item == 2;
  }

  /// Terms, until their bucket is waited for, and the sum of one shard. `lends`: at most two
  /// buckets have memory.
  static int64_t exchange_bytes(const ReductionLoad& load, bool lends) {
    constexpr int64_t kWide = 4;
    int64_t bytes =
        times(lends ? std::min(times(2, load.largest), load.total) : load.total, load.item);
    add(bytes, times(load.largest / load.ranks, kWide));
    return bytes;
  }

  /// Elements of whole gradients that exist at once: all if micro-batches accumulate or if nothing
  /// is reduced before backward ends, otherwise a piece that gets gradients and the one before it,
  /// which is reduced.
  int64_t lent_grads(const std::vector<PlannedBuffer>& pieces) const {
    int64_t all = 0, pair = 0;
    for (size_t i = 0; i < pieces.size(); ++i) {
      add(all, pieces[i].layout.numel);
      pair = std::max(pair, pieces[i].layout.numel + (i > 0 ? pieces[i - 1].layout.numel : 0));
    }
    return num_microbatches_ > 1 || config_.ddp.allow_unused_parameters ? all : pair;
  }

  /// Elements of whole parameters that exist at once: a unit and a piece of the next one, in the
  /// order of forward or backward. `tied`: the first unit is also used after the last one.
  static int64_t lent_params(const std::vector<PlannedBuffer>& pieces, bool tied) {
    struct Unit {
      int64_t number = 0, numel = 0, largest = 0;
    };
    std::vector<Unit> units;
    for (const PlannedBuffer& piece : pieces) {
      if (units.empty() || units.back().number != piece.unit) units.push_back({piece.unit});
      add(units.back().numel, piece.layout.numel);
      units.back().largest = std::max(units.back().largest, piece.layout.numel);
    }
    if (tied && units.size() > 2) units.push_back(units.front());
    int64_t most = units.empty() ? 0 : units.front().numel;
    for (size_t i = 1; i < units.size(); ++i) {
      const Unit &a = units[i - 1], &b = units[i];
      most = std::max(most, std::max(a.numel + b.largest, b.numel + a.largest));
    }
    return most;
  }

  /// The number of pieces in flight, each of one micro-batch in one chunk.
  static int64_t chunks_in_flight(const ScheduleOptions& options, int64_t stage) {
    const int64_t pieces = checked_mul(options.microbatches, options.virtual_pipeline, "pieces");
    if (options.family == ScheduleFamily::gpipe) return pieces;
    if (options.family == ScheduleFamily::zb_h1) return std::min(pieces, options.pipeline);
    return std::min(pieces, num_warmup_microbatches(options, stage) + 1);
  }

  /// The number of those in one chunk of `stage`, at most, if there are several chunks.
  static int64_t in_flight_of_chunk(const ScheduleOptions& options, int64_t stage, int64_t chunk) {
    const auto table =
        schedule_table(options.microbatches, options.virtual_pipeline, options.group_size());
    const auto ahead = static_cast<size_t>(num_warmup_microbatches(options, stage));
    int64_t now = 0, most = 0;
    for (size_t k = 0; k < table.size(); ++k) {
      if (table[k].second == chunk) most = std::max(most, ++now);
      // Backward passes through the chunks in the opposite order.
      if (k >= ahead && table[k - ahead].second + chunk + 1 == options.virtual_pipeline) --now;
    }
    return most;
  }

  /// The number of micro-batches of which a chunk keeps what its embedding or output needs.
  static int64_t ends_in_flight(const ScheduleOptions& options, int64_t stage, int64_t chunk) {
    return options.virtual_pipeline == 1 ? chunks_in_flight(options, stage)
                                         : in_flight_of_chunk(options, stage, chunk);
  }

  void add_activations(StageMemory& memory, const std::vector<ModelChunk>& chunks) const {
    const ScheduleOptions options = schedule_options(config_, num_microbatches_);
    const int64_t in_flight = chunks_in_flight(options, memory.stage);
    int64_t largest_layers = 0, deferred = 0, working = 0, on_host = 0;
    for (size_t c = 0; c < chunks.size(); ++c) {
      const ModelChunk& chunk = chunks[c];
      const ActivationPlan plan = plan_activations(config_, chunk, chunk.first_layer);
      largest_layers = std::max(largest_layers, plan.layers);
      deferred = std::max(deferred, plan.deferred - plan.layers);
      working = std::max(working, plan.working);
      on_host = std::max(on_host, plan.on_host);
      if (plan.ends > 0)
        add(memory.activation_bytes,
            times(ends_in_flight(options, memory.stage, static_cast<int64_t>(c)), plan.ends));
      add(memory.activation_bytes, rotary_table_bytes(config_, chunk));
    }
    add(memory.activation_bytes, times(in_flight, largest_layers));
    if (options.family == ScheduleFamily::zb_h1)
      add(memory.activation_bytes, times(std::min(in_flight, memory.stage + 1), deferred));
    add(memory.activation_bytes, working);
    add(memory.host_bytes, times(in_flight, on_host));
  }

  void add_transfers(StageMemory& memory) const {
    const int64_t stages = parallel_.pipeline_model_parallel_size;
    const bool is_ring = parallel_.virtual_pipeline_model_parallel_size.value_or(1) > 1;
    const int64_t neighbours =
        is_ring ? 2 : (memory.stage > 0 ? 1 : 0) + (memory.stage + 1 < stages ? 1 : 0);
    const int64_t parts = parallel_.context_parallel_size *
                          (parallel_.sequence_parallel ? parallel_.tensor_model_parallel_size : 1);
    const int64_t tokens = times(config_.model.seq_length / parts, config_.train.micro_batch_size);
    add(memory.communication_bytes,
        times(times(times(neighbours, tokens), config_.model.hidden_size), element_));
  }

  const Config& config_;
  const UpdateStatement* own_rule_;
  const ParallelConfig& parallel_;
  RankGrids grids_;
  int64_t num_microbatches_;
  int64_t element_;       ///< bytes
  int64_t grad_element_;  ///< bytes
};

/// A column of StageMemory.
struct Column {
  const char* name;
  int64_t (*value)(const StageMemory&);
};

constexpr Column kColumns[] = {
    {"parameter_bytes", [](const StageMemory& s) { return s.parameter_bytes; }},
    {"gradient_bytes", [](const StageMemory& s) { return s.gradient_bytes; }},
    {"optimizer_bytes", [](const StageMemory& s) { return s.optimizer_bytes; }},
    {"activation_bytes", [](const StageMemory& s) { return s.activation_bytes; }},
    {"communication_bytes", [](const StageMemory& s) { return s.communication_bytes; }},
    {"total_bytes", [](const StageMemory& s) { return s.total_bytes(); }},
};

bool is_recorded(const MemoryPlan& plan) {
  return !plan.stages.empty() && plan.stages.front().recorded_peak_bytes;
}

double mib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

bool uses_host(const MemoryPlan& plan) {
  return std::any_of(plan.stages.begin(), plan.stages.end(),
                     [](const StageMemory& stage) { return stage.host_bytes > 0; });
}

}  // namespace

int64_t StageMemory::total_bytes() const {
  int64_t total = 0;
  for (const int64_t bytes :
       {parameter_bytes, gradient_bytes, optimizer_bytes, activation_bytes, communication_bytes})
    add(total, bytes);
  return total;
}

MemoryPlan plan_memory(const Config& config, std::optional<int64_t> world_size,
                       const UpdateStatement* rule) {
  const ParallelConfig& parallel = config.parallel;
  MemoryPlan plan;
  plan.world_size = world_size ? *world_size : fewest_ranks(parallel);
  const Planner planner(config, plan.world_size, rule);
  for (int64_t stage = 0; stage < parallel.pipeline_model_parallel_size; ++stage)
    plan.stages.push_back(planner.stage(stage));
  return plan;
}

bool fits_memory(const Config& config, int64_t world_size, double bytes) {
  const Planner planner(config, world_size, /*rule=*/nullptr);
  for (int64_t stage = 0; stage < config.parallel.pipeline_model_parallel_size; ++stage)
    if (!planner.fits(stage, bytes)) return false;
  return true;
}

std::vector<int64_t> recorded_peaks(const JobProgram& job) {
  const RankGroups stages = job.grids->groups(GroupKind::pp);
  std::vector<int64_t> peaks(static_cast<size_t>(job.grids->size(GroupKind::pp)));
  for (int64_t rank = 0; rank < job.world_size(); ++rank) {
    const RankProgram& program = job.programs[job.program_of[static_cast<size_t>(rank)]];
    int64_t& peak = peaks[static_cast<size_t>(*stages.position_of(rank))];
    peak = std::max(peak, program.peak_bytes);
  }
  return peaks;
}

void write_json(std::ostream& out, const MemoryPlan& plan) {
  nlohmann::ordered_json json = {{"world_size", plan.world_size},
                                 {"stages", nlohmann::ordered_json::array()}};
  for (const StageMemory& stage : plan.stages) {
    nlohmann::ordered_json& one = json["stages"].emplace_back();
    one = {{"stage", stage.stage}, {"parameters", stage.parameters}};
    for (const Column& column : kColumns) one[column.name] = column.value(stage);
    if (uses_host(plan)) one["host_bytes"] = stage.host_bytes;
    if (stage.recorded_peak_bytes) one["recorded_peak_bytes"] = *stage.recorded_peak_bytes;
  }
  out << json.dump() << "\n";
}

void write_text(std::ostream& out, const MemoryPlan& plan) {
  out << fmt::format("world size {}; one rank of each pipeline stage, MiB\n", plan.world_size)
      << fmt::format("{:>5}  {:>15}  {:>11}  {:>11}  {:>11}  {:>11}  {:>13}  {:>11}{}{}\n", "stage",
                     "parameters", "weights", "gradients", "optimizer", "activations",
                     "communication", "total", uses_host(plan) ? "    on host" : "",
                     is_recorded(plan) ? "  recorded peak" : "");
  for (const StageMemory& stage : plan.stages) {
    out << fmt::format("{:>5}  {:>15}", stage.stage, stage.parameters);
    for (const Column& column : kColumns)
      out << fmt::format("  {:>{}.2f}", mib(column.value(stage)),
                         column.name == std::string_view("communication_bytes") ? 13 : 11);
    if (uses_host(plan)) out << fmt::format("  {:>9.2f}", mib(stage.host_bytes));
    if (stage.recorded_peak_bytes)
      out << fmt::format("  {:>13.2f}", mib(*stage.recorded_peak_bytes));
    out << "\n";
  }
}

}  // namespace lockstep
