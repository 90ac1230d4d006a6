#include "lockstep/checkpoint/checkpoint_saver.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <future>
#include <optional>

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/finite_values.h"
#include "lockstep/checkpoint/rank_reports.h"
#include "lockstep/checkpoint/shard_file.h"
#include "lockstep/checkpoint/state_share.h"
#include "lockstep/checkpoint/step_folders.h"
#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/integers.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;

constexpr const char* kBusy = "busy";
constexpr const char* kStuck = "stuck";
constexpr const char* kDone = "done";
constexpr std::string_view kFailed = "failed: ";
constexpr std::string_view kDiverged = "diverged: ";
constexpr std::string_view kNoted = "done, but: ";

std::string shard_name(int64_t rank) { return fmt::format("rank_{:05}.safetensors", rank); }

/// The first status of a rank that begins with `kind`; empty if there is none.
std::string first_of(std::string_view kind, const std::vector<std::string>& statuses) {
  for (size_t rank = 0; rank < statuses.size(); ++rank)
    if (statuses[rank].starts_with(kind))
      return fmt::format("rank {}: {}", rank, statuses[rank].substr(kind.size()));
  return "";
}

}  // namespace

/// One save of this rank: it writes the rank's part, and on rank 0 completes the checkpoint. Runs
/// on a thread, where it touches no tensor's metadata, only memory.
struct CheckpointSaver::Job {
  struct Copy {
    const void* from;
    void* to;
    size_t bytes;
  };

  PartialCheckpoint checkpoint;
  int64_t rank;
  int64_t world_size;
  KeptSteps kept;
  Manifest whole = {};                                ///< without files and tensors
  std::string config = {};                            ///< text
  std::vector<at::Tensor> memory = {};                ///< what contents and copies point to
  std::vector<Copy> copies = {};                      ///< the thread makes them first
  at::Tensor staging = {};                            ///< memory of the copies
  int64_t staged = 0;                                 ///< bytes of it that are taken
  std::optional<c10::Event> staged_from_device = {};  ///< recorded after a device's copies
  std::promise<void> copied = {};
  std::future<void> was_copied = copied.get_future();
  std::vector<ShardContent> contents = {};
  std::vector<ManifestTensor> tensors = {};  ///< as contents, without pieces
  std::vector<size_t> weights = {};          ///< indices of the contents that must be finite
  std::atomic<bool> abandoned = false;
  std::atomic<bool> failed = false;     ///< other ranks may wait for this one until finish_first()
  std::shared_future<void> after = {};  ///< the end of the previous job, if that was under way
  std::promise<void> ended = {};
  std::future<std::string> outcome = {};  ///< kDone, or kNoted, kDiverged or kFailed and why

  /// If no thread can be started for it, the job has failed.
  void start() {
    try {
      outcome = std::async(std::launch::async, [this] {
        for (const Copy& copy : copies) std::memcpy(copy.to, copy.from, copy.bytes);
        copied.set_value();
        return ended_as(status_of_run());
      });
    } catch (const std::exception& error) {
      copied.set_value();
      std::promise<std::string> told;
      told.set_value(ended_as(
          fmt::format("{}the thread that writes cannot be started: {}", kFailed, error.what())));
      outcome = told.get_future();
    }
  }
  bool is_busy() const { return outcome.wait_for(milliseconds(0)) != std::future_status::ready; }

 private:
  std::string ended_as(std::string status) {
    failed = status.starts_with(kFailed) || status.starts_with(kDiverged);
    ended.set_value();
    return status;
  }

  std::string status_of_run() {
    try {
      const std::string problem = run();
      return problem.empty() ? kDone : std::string(kNoted) + problem;
    } catch (const DivergenceError& error) {
      return status_of_failure(kDiverged, error.what());
    } catch (const std::filesystem::filesystem_error& error) {
      return status_of_failure(
          kFailed, fmt::format("'{}': {}", error.path1().string(), error.code().message()));
    } catch (const std::exception& error) {
      return status_of_failure(kFailed, error.what());
    }
  }

  /// First removes the shard: it may fill the disk, and the loop, which writes there too, may not
  /// ask for the status until the next save is due.
  std::string status_of_failure(std::string_view kind, const std::string& what) const {
    std::error_code ignored;
    std::filesystem::remove(checkpoint.file(shard_name(rank)), ignored);
    return std::string(kind) + what;
  }

  /// Returns a problem that leaves the checkpoint complete.
  std::string run() {
    const std::string problem = after.valid() ? begin_behind() : "";
    if (staged_from_device) wait_for_device();
    check_finite();
    const Manifest part = write();
    if (rank != 0) {
      write_report(checkpoint, rank, part, &abandoned);
      return problem;
    }
    std::vector<Manifest> parts = {part};
    for (int64_t other = 1; other < world_size; ++other)
      parts.push_back(wait_for_report(checkpoint, other, &abandoned));
    const std::string text = format_manifest(join_manifests(whole, parts));
    parse_manifest(text, checkpoint.file(kManifestName));
    for (int64_t other = 1; other < world_size; ++other) remove_report(checkpoint, other);
    throw_if_cancelled(&abandoned);
    return join_problems({problem, checkpoint.commit(text, kept)});
  }

  /// A new thread is on the first device, where waiting would make a context.
  void wait_for_device() const {
    const c10::Device device = staged_from_device->device();
    c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
    staged_from_device->synchronize();
  }

  /// After the previous job: rank 0 makes the folder, which removes all incomplete ones, and the
  /// other ranks wait for it.
  std::string begin_behind() const {
    after.wait();
    if (rank == 0 && !abandoned) return checkpoint.begin();
    wait_for_path(std::filesystem::path(checkpoint.file("")).parent_path(), &abandoned);
    return "";
  }

  void check_finite() const {
    for (const size_t i : weights) {
      throw_if_cancelled(&abandoned);
      const ShardContent& content = contents[i];
      const int64_t count = count_not_finite(content.dtype, content.data, content.bytes);
      require<DivergenceError>(count == 0, "{}",
                               describe_not_finite(tensor_key(content.name, content.state), count,
                                                   content.part.range.numel()));
    }
  }

  Manifest write() const {
    Manifest part;
    const std::string folder = std::filesystem::path(checkpoint.file("")).parent_path();
    if (rank == 0) part.files.push_back(write_text_file(folder, kConfigName, config));
    if (contents.empty()) return part;
    const WrittenShard written = write_shard(folder, shard_name(rank), contents, &abandoned);
    const auto file = static_cast<int64_t>(part.files.size());
    part.files.push_back(written.file);
    for (size_t i = 0; i < contents.size(); ++i) {
      part.tensors.push_back(tensors[i]);
      part.tensors.back().pieces.push_back({file, written.offsets[i], contents[i].part});
    }
    return part;
  }
};

CheckpointSaver::CheckpointSaver(const ParallelState& parallel_state,
                                 CheckpointSaverOptions options)
    : state_(parallel_state), options_(std::move(options)) {}

CheckpointSaver::~CheckpointSaver() {
  for (const auto& job : jobs_) job->abandoned = true;
}

at::Tensor CheckpointSaver::staging_for(const std::vector<StateTensor>& tensors) {
  int64_t bytes = 0;
  for (const size_t i : mine_)
    bytes += round_up(static_cast<int64_t>(tensors.at(i).values.nbytes()), kShareAlignment);
  const auto in_use = [&](const at::Tensor& memory) {
    return std::any_of(jobs_.begin(), jobs_.end(),
                       [&](const auto& job) { return job->staging.is_same(memory); });
  };
  std::erase_if(staging_, [&](const at::Tensor& memory) {
    return memory.numel() != bytes && !in_use(memory);
  });
  for (const at::Tensor& memory : staging_)
    if (!in_use(memory)) return memory;
  staging_.push_back(host_memory(bytes, state_.device()));
  return staging_.back();
}

void CheckpointSaver::stage(Job& job, const at::Tensor& values) const {
  const at::Tensor target = at::from_blob(static_cast<char*>(job.staging.data_ptr()) + job.staged,
                                          values.sizes(), at::TensorOptions(values.scalar_type()));
  job.staged += round_up(static_cast<int64_t>(values.nbytes()), kShareAlignment);
  if (options_.copy_in_background && values.is_cpu() && values.is_contiguous()) {
    job.copies.push_back({values.const_data_ptr(), target.data_ptr(), values.nbytes()});
    job.memory.push_back(values);
  } else {
    target.copy_(values, /*non_blocking=*/true);
  }
  job.memory.push_back(target);
}

/// The copies run on the current stream, and so does what changes the tensors after them.
void CheckpointSaver::note_staged(Job& job, c10::Device device) {
  if (device.is_cpu()) return;
  job.staged_from_device.emplace(device.type());
  const c10::impl::VirtualGuardImpl guard(device.type());
  job.staged_from_device->record(guard.getStream(device));
}

void CheckpointSaver::check_list(const std::vector<StateTensor>& tensors) const {
  const std::vector<std::string> keys = keys_of(tensors);
  const auto [was, is] = std::mismatch(keys_.begin(), keys_.end(), keys.begin(), keys.end());
  const auto name = [](auto at, auto end) {
    return at == end ? std::string("none") : "'" + *at + "'";
  };
  require<UsageError>(was == keys_.end() && is == keys.end(),
                      "checkpoint: tensor number {}: found {}, allowed: {}, as in the first save; "
                      "another list needs another CheckpointSaver",
                      was - keys_.begin(), name(is, keys.end()), name(was, keys_.end()));
}

std::unique_ptr<CheckpointSaver::Job> CheckpointSaver::make_job(
    const std::vector<StateTensor>& tensors, const TrainingProgress& progress,
    const Config& config) {
  const at::NoGradGuard no_grad;
  check_list(tensors);
  auto job = std::unique_ptr<Job>(
      new Job{.checkpoint = {options_.folder, progress.iteration},
              .rank = state_.rank(),
              .world_size = state_.world_size(),
              .kept = {options_.keep, progress.skipped_steps, progress.skipped_steps > 0, origin_,
                       origin_ ? &saved_ : nullptr},
              .whole = manifest_of(progress, config, state_, options_.job_id),
              .config = print_config(config)});
  if (options_.async) job->staging = staging_for(tensors);
  for (const size_t i : mine_) {
    const StateTensor& tensor = tensors.at(i);
    if (!tensor.is_buffer && must_be_finite(tensor.state))
      job->weights.push_back(job->contents.size());
    const at::Tensor values = tensor.values.detach();
    if (options_.async)
      stage(*job, values);
    else
      job->memory.push_back(values.to(at::kCPU).contiguous());
    const at::Tensor& memory = job->memory.back();
    const char* const dtype = safetensors_dtype(memory.scalar_type());
    job->contents.push_back({tensor.name, tensor.state, dtype, tensor.part, memory.const_data_ptr(),
                             static_cast<int64_t>(memory.nbytes())});
    job->tensors.push_back({tensor.name, tensor.state, dtype, tensor.part.box.shape, {}});
  }
  if (options_.async) note_staged(*job, state_.device());
  return job;
}

bool CheckpointSaver::is_in_progress() const {
  std::string status = !jobs_.empty() && jobs_.back()->is_busy() ? kBusy : kDone;
  for (const auto& job : jobs_)
    if (job->failed) status = kFailed;
  const auto all = all_gather_texts(state_.world(), status, "checkpoint busy");
  return first_of(kFailed, all).empty() && std::find(all.begin(), all.end(), kBusy) != all.end();
}

SaveResult CheckpointSaver::save(const std::vector<StateTensor>& tensors,
                                 const TrainingProgress& progress, const Config& config,
                                 bool may_skip, bool unproven) {
  SaveResult result;
  const bool may_be_second = may_skip && options_.async && !state_.device().is_cpu();
  may_skip = may_skip && options_.async && options_.when_busy == AsyncWhenBusy::skip;
  if (may_skip && is_in_progress()) return {};
  make_room(may_be_second ? 2 : 1, progress.iteration, result);
  if (!planned_) {
    mine_ = share_of_rank(tensors, state_);
    keys_ = keys_of(tensors);
    planned_ = true;
  }
  auto job = begin(tensors, progress, config, result);
  job->kept.unproven = job->kept.unproven || unproven;
  if (!jobs_.empty()) job->after = jobs_.back()->ended.get_future().share();
  result.path = job->checkpoint.path();
  jobs_.push_back(std::move(job));
  jobs_.back()->start();
  if (!options_.async) result.problem = join_problems({result.problem, finish()});
  return result;
}

void CheckpointSaver::make_room(size_t most, int64_t iteration, SaveResult& result) {
  const std::string path = PartialCheckpoint(options_.folder, iteration).path();
  const auto wait = [&] {
    return jobs_.size() >= most || jobs_.back()->checkpoint.path() == path || !is_in_progress();
  };
  while (!jobs_.empty() && wait()) try {
      result.problem = join_problems({result.problem, finish_first()});
    } catch (const FileError& error) {
      if (result.last_error.empty()) result.last_error = error.what();
    }
}

std::unique_ptr<CheckpointSaver::Job> CheckpointSaver::begin(
    const std::vector<StateTensor>& tensors, const TrainingProgress& progress, const Config& config,
    SaveResult& result) {
  const bool makes_folder = state_.rank() == 0 && jobs_.empty();
  std::string status = kDone;
  std::unique_ptr<Job> job;
  try {
    job = make_job(tensors, progress, config);
    if (makes_folder) result.problem = join_problems({result.problem, job->checkpoint.begin()});
  } catch (const c10::Error& error) {
    status = std::string(kFailed) + error.what_without_backtrace();
  } catch (const std::exception& error) {
    status = std::string(kFailed) + error.what();
  }
  const std::string failure =
      first_of(kFailed, all_gather_texts(state_.world(), status, "checkpoint begin"));
  if (failure.empty()) return job;
  if (makes_folder && job) job->checkpoint.discard();
  const std::string& last = result.last_error;
  const std::string told = last.empty() ? "" : "the save before this one failed: " + last;
  fail<FileError>("{}", join_problems({failure, told, result.problem}));
}

void CheckpointSaver::finish_copy() {
  if (!jobs_.empty()) jobs_.back()->was_copied.wait();
}

std::string CheckpointSaver::finish() {
  std::string problem;
  std::exception_ptr failure;
  while (!jobs_.empty()) try {
      problem = join_problems({problem, finish_first()});
    } catch (const FileError&) {
      if (!failure) failure = std::current_exception();
    }
  if (failure) std::rethrow_exception(failure);
  return problem;
}

std::string CheckpointSaver::finish_first() {
  using Clock = std::chrono::steady_clock;
  Job& job = *jobs_.front();
  const milliseconds timeout = state_.world().timeout();
  // Less than the group's timeout, so that a rank with little to write need not give up on another.
  const milliseconds patience = std::min(milliseconds(1000), timeout / 4);
  auto limit = Clock::time_point::max();
  std::string status = kBusy, failure, divergence, problem;
  // A save that has failed must end on all ranks, too: what a thread still writes by its path would
  // otherwise be part of the next save of this step.
  for (bool busy = true; busy;) {
    if (status == kBusy && job.outcome.wait_for(patience) == std::future_status::ready)
      status = job.outcome.get();
    if (status == kBusy && Clock::now() > limit) status = kStuck;
    const auto statuses = all_gather_texts(state_.world(), status, "checkpoint end");
    busy = std::find(statuses.begin(), statuses.end(), kBusy) != statuses.end();
    problem = first_of(kNoted, statuses);
    if (job.abandoned) continue;  // later failures follow from the first
    failure = first_of(kFailed, statuses);
    divergence = first_of(kDiverged, statuses);
    if (failure.empty() && divergence.empty()) continue;
    job.abandoned = true;
    limit = Clock::now() + timeout;
  }
  if (status == kStuck) job.outcome.wait();  // the others time out in their next collective
  if (job.abandoned && state_.rank() == 0) job.checkpoint.discard();
  jobs_.pop_front();
  require<FileError>(failure.empty(), "{}", failure);
  require<DivergenceError>(divergence.empty(), "{}", divergence);
  return problem;
}

}  // namespace lockstep
