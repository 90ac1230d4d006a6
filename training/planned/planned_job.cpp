#include "lockstep/training/planned_job.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/context_parallel_rules.h"
#include "lockstep/core/usable_cores.h"
#include "lockstep/datasets/batch_sizes.h"
#include "lockstep/models/routing.h"
#include "lockstep/parallel_state/job_program.h"
#include "lockstep/parallel_state/planned_rank.h"
#include "lockstep/parallel_state/rank_recorder.h"
#include "lockstep/planner/config_grids.h"
#include "lockstep/training/kernel_costs.h"
#include "lockstep/training/planned_device.h"
#include "lockstep/training/planned_host.h"
#include "lockstep/training/repeated_tasks.h"
#include "lockstep/training/run_setup.h"
#include "lockstep/training/trainer.h"

namespace lockstep {
namespace {

constexpr int64_t kMostPlaces = 128, kMostTimedPlaces = 16;
constexpr int kSteps = 2;  // for first uses, and for overlap with the next step

/// What the formulas of planner/ assume unless train.device = cuda: no padding of the vocabulary
/// for GPUs, and one memory.
void resolve_without_gpu(Config& config) {
  if (config.train.device == DeviceChoice::cuda) return;
  auto& multiple = config.model.make_vocab_size_divisible_by;
  multiple = multiple.value_or(1);
  config.model.offload_activations = false;
  config.optimizer.offload = false;
}

/// The part of `given` that is planned. ConfigError as for Trainer.
Config planned_config(const Config& given, int64_t world_size) {
  check_supported(given);
  check_layout(given, world_size);
  Config config = given;
  resolve_without_gpu(config);
  config.data = {};
  config.data.tokenizer = given.data.tokenizer;
  config.data.mock = true;
  config.data.prefetch = 0;
  config.train.task = TrainTask::pretrain;
  const RankGrids grids = config_grids(given.parallel, world_size);
  config.train.global_batch_size = batch_sizes(given.train, grids.data_parallel_size()).global;
  config.train.rampup_batch_size.reset();
  config.train.step_batch_size_schedule.reset();
  config.checkpoint = {};
  config.train.cuda_graph = CudaGraph::none;
  config.train.deterministic = false;
  config.train.replay_interval.reset();
  config.train.eval_iters = std::min<int64_t>(config.train.eval_iters, 1);
  return config;
}

/// Records what the host of a rank reads and waits for.
class RecordingHost : public PlannedHost {
 public:
  RecordingHost(RankRecorder& recorder, const Config& config, const RankGrids& grids)
      : tasks(recorder, *memory()), recorder_(recorder), config_(config), grids_(grids) {}

  uint32_t stream_position() const override { return recorder_.device_waits(); }
  void wait_for_stream(uint32_t position) override { recorder_.on_host_wait(position); }
  void on_kernel(const ProgramKernel& kernel) override {
    if (keeps_kernels) recorder_.on_kernel(kernel);
  }

  void read(const at::Tensor& /*device*/, at::Tensor& host) const override {
    host.zero_();
    if (!config_.model.num_experts || host.dim() == 0) return;
    if (host.scalar_type() == at::kInt) return read_ends(host);
    if (host.scalar_type() != at::kLong) return;
    auto* const counts = host.mutable_data_ptr<int64_t>();
    for (int64_t i = 0; i < host.numel(); ++i) counts[i] = tokens_of_expert(i);
  }

  RepeatedTasks* repeated_tasks() override { return repeats_tasks ? &tasks : nullptr; }

  bool keeps_kernels = false, repeats_tasks = false;
  RepeatedTasks tasks;

 private:
  /// The RowGroups of a rank that has all experts; of others the host knows them.
  void read_ends(const at::Tensor& host) const {
    const bool gathered = config_.model.moe_token_dispatcher_type == TokenDispatcher::allgather;
    const int64_t ranks = gathered ? 1 : grids_.size(GroupKind::tp_ep);
    auto* const ends = host.mutable_data_ptr<int32_t>();
    int64_t end = 0;
    for (int64_t i = 0; i < host.numel(); ++i)
      ends[i] = static_cast<int32_t>(end += ranks * tokens_of_expert(i));
  }

  int64_t tokens_of_expert(int64_t index) const {
    const ParallelConfig& parallel = config_.parallel;
    const int64_t experts = *config_.model.num_experts;
    // Without sequence parallelism the expert layer itself cuts the tokens over tp.
    const int64_t chunks = parallel.context_parallel_size * parallel.tensor_model_parallel_size;
    const int64_t tokens = config_.train.micro_batch_size * config_.model.seq_length;
    int64_t pairs = tokens / chunks * config_.model.moe_router_topk;
    if (const auto& factor = config_.model.moe_expert_capacity_factor) {
      const int64_t most = expert_capacity(tokens, config_.model.moe_router_topk, experts, *factor);
      const int64_t room = experts * std::min(most, tokens) / chunks;
      pairs = config_.model.moe_pad_expert_input_to_capacity ? room : std::min(pairs, room);
    }
    if (config_.model.moe_token_dispatcher_type == TokenDispatcher::allgather)
      pairs *= grids_.size(GroupKind::tp_ep);
    const int64_t expert = index % experts;
    return (expert + 1) * pairs / experts - expert * pairs / experts;
  }

  RankRecorder& recorder_;
  const Config& config_;
  const RankGrids& grids_;
};

using TextLengths = RankRecorder::TextLengths;

/// Records ranks of a job.
class JobRecorder {
 public:
  JobRecorder(const Config& config, int64_t world_size, bool kernels, PlannedTasks tasks)
      : config_(config),
        grids_(config_grids(config.parallel, world_size)),
        device_(config.train.device == DeviceChoice::cpu),
        kernels_(kernels),
        repeats_tasks_(tasks == PlannedTasks::repeated) {}

  const RankGrids& grids() const { return grids_; }

  /// `lengths`: those of the texts that earlier ranks gathered; takes longer ones of this rank.
  RankProgram record(int64_t rank, TextLengths& lengths) {
    if (repeats_tasks_) {
      if (auto program = try_to_record(rank, lengths, /*repeats_tasks=*/true)) return *program;
      repeats_tasks_ = false;  // other ranks would not succeed either
    }
    return *try_to_record(rank, lengths, /*repeats_tasks=*/false);
  }

 private:
  /// Unset: tasks cannot be repeated.
  std::optional<RankProgram> try_to_record(int64_t rank, TextLengths& lengths,
                                           bool repeats_tasks) const;

  const Config& config_;
  RankGrids grids_;
  PlannedDevice device_;
  bool kernels_;
  std::atomic<bool> repeats_tasks_;
};

std::optional<RankProgram> JobRecorder::try_to_record(int64_t rank, TextLengths& lengths,
                                                      bool repeats_tasks) const {
  const auto recorder = std::make_shared<RankRecorder>(rank, lengths);
  RecordingHost host(*recorder, config_, grids_);
  host.repeats_tasks = repeats_tasks;
  ParallelStateOptions options = parallel_options(config_, PlannedDevice::device());
  options.announcement.clear();
  const ParallelState state =
      ParallelState::planning_rank(grids_.sizes(), rank, PlannedRank{recorder, options});
  Trainer trainer(config_, state);
  const auto observer = kernels_ ? std::make_unique<KernelObserver>() : nullptr;
  for (int step = 0; step < kSteps; ++step) {
    host.keeps_kernels = kernels_;
    trainer.train_step();
    if (host.tasks.failed()) return std::nullopt;
    host.keeps_kernels = false;
    recorder->end_step();
    state.check_in_step();
  }
  if (config_.train.eval_iters > 0) trainer.validate();
  if (host.tasks.failed()) return std::nullopt;
  lengths = recorder->text_lengths();
  RankProgram program = recorder->take();
  program.peak_bytes = host.memory()->peak;
  program.repeated_tasks = host.tasks.repeated();
  return program;
}

/// Whether context-parallel ranks of a stage give their devices different work: unless each has all
/// tokens of some heads.
bool works_by_context_position(const Config& config) {
  if (config.parallel.context_parallel_size == 1) return false;
  const std::vector<int64_t> levels = context_parallel_levels(config.parallel);
  for (int64_t layer = 0; layer < config.model.num_layers; ++layer) {
    const auto communication = context_communication(config.model, config.parallel, layer);
    const bool by_heads = communication == ContextCommunication::a2a ||
                          (communication == ContextCommunication::a2a_p2p && levels.at(1) == 1);
    if (!by_heads) return true;
  }
  return false;
}

/// The program number of each rank; ranks with equal numbers do the same, each in its own groups.
std::vector<uint32_t> programs_of(const Config& config, const RankGrids& grids, bool kernels) {
  // A rank finishes and updates what lies in its shard.
  const int64_t places = grids.size(GroupKind::pp) * grids.size(GroupKind::dp_cp);
  const int64_t most = kernels ? kMostTimedPlaces : kMostPlaces;
  const bool cuts_shards = config.ddp.use_distributed_optimizer && places <= most;
  const bool shares_groups =
      config.model.num_query_groups && *config.model.num_query_groups < grids.size(GroupKind::tp);
  const int64_t most_by_context = config.model.window_size ? kMostPlaces : kMostTimedPlaces;
  const bool differs_over_context =
      kernels && !cuts_shards && works_by_context_position(config) &&
      grids.size(GroupKind::pp) * grids.size(GroupKind::cp) <= most_by_context;
  std::vector<RankGroups> placed = {grids.groups(GroupKind::pp)};
  if (cuts_shards)
    for (const GroupKind kind : {GroupKind::dp_cp, GroupKind::expert_dp})
      placed.push_back(grids.groups(kind));
  if (differs_over_context) placed.push_back(grids.groups(GroupKind::cp));
  if (shares_groups) placed.push_back(grids.groups(GroupKind::tp));
  std::map<std::vector<int64_t>, uint32_t> known;
  std::vector<uint32_t> programs;
  for (int64_t rank = 0; rank < grids.sizes().world_size; ++rank) {
    std::vector<int64_t> place;
    for (const RankGroups& groups : placed) place.push_back(*groups.position_of(rank));
    programs.push_back(
        known.try_emplace(std::move(place), static_cast<uint32_t>(known.size())).first->second);
  }
  return programs;
}

/// Calls body(i) for i < count on a thread for each usable core; throws the first error.
void in_threads(size_t count, const std::function<void(size_t)>& body) {
  std::atomic<size_t> next = 0;
  std::mutex mutex;
  std::exception_ptr error;
  const auto work = [&] {
    for (size_t i = next++; i < count; i = next++) try {
        body(i);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!error) error = std::current_exception();
        next = count;
      }
  };
  std::vector<std::thread> threads;
  const auto cores = static_cast<size_t>(usable_cores());
  for (size_t i = 1; i < std::min(count, cores); ++i) threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace

RankProgram record_rank(const Config& given, int64_t world_size, int64_t rank, bool kernels) {
  const Config config = planned_config(given, world_size);
  JobRecorder recorder(config, world_size, kernels, PlannedTasks::repeated);
  TextLengths lengths;
  return recorder.record(rank, lengths);
}

JobProgram record_job(const Config& given, int64_t world_size, bool kernels, PlannedTasks tasks) {
  const Config config = planned_config(given, world_size);
  JobRecorder recorder(config, world_size, kernels, tasks);
  const RankGrids& grids = recorder.grids();
  JobProgram job{.programs = {}, .program_of = programs_of(config, grids, kernels), .grids = grids};
  std::vector<int64_t> first;  // first rank of each program
  for (int64_t rank = 0; rank < world_size; ++rank)
    if (job.program_of[static_cast<size_t>(rank)] == first.size()) first.push_back(rank);
  job.programs.resize(first.size());
  TextLengths lengths;  // ties begin on the first stage, whose texts are longest
  job.programs[0] = recorder.record(first[0], lengths);
  in_threads(first.size() - 1, [&](size_t next) {
    const size_t i = next + 1;
    TextLengths known = lengths;
    try {
      job.programs[i] = recorder.record(first[i], known);
    } catch (const ConfigError&) {
      throw;
    } catch (const std::exception& error) {
      fail<Error>("planned rank {} of {}: {}", first[i], world_size, error.what());
    }
  });
  return job;
}

OrderVerdict verify_job(const Config& config, int64_t world_size) {
  return prove_order(record_job(config, world_size));
}

}  // namespace lockstep
