#include "lockstep/training/run_checkpoints.h"

#include <utility>
#include <vector>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/copy_loader.h"
#include "lockstep/checkpoint/shared_checkpoint.h"
#include "lockstep/core/check.h"
#include "lockstep/core/config_rules.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/training/same_model.h"

namespace lockstep {
namespace {

/// The checkpoint that `folder` means, as rank 0 finds it; empty if it holds none.
std::string agree_on_checkpoint(const std::string& folder, const ParallelState& state) {
  const auto find = [&] { return has_checkpoint(folder) ? find_checkpoint(folder) : ""; };
  return as_rank_0_finds(state, find, "checkpoint to load");
}

struct OfJob {
  std::string path;                   ///< empty: there is none
  std::vector<std::string> problems;  ///< why newer ones are left out
};

/// The newest complete checkpoint that a job has saved and that is not yet in `seen`; adds what it
/// looks at. One whose manifest or configuration cannot be read is left out: the run has nobody to
/// ask.
OfJob newest_of_job(const std::string& folder, const std::string& job_id,
                    std::set<std::string>& seen) {
  OfJob found;
  for (const std::string& path : complete_checkpoints(folder)) {
    if (!seen.insert(path).second) continue;
    try {
      CheckpointReader checkpoint(path);
      if (checkpoint.manifest().job_id != job_id) continue;
      (void)checkpoint.config();
      found.path = path;
      break;
    } catch (const FileError& error) {
      found.problems.emplace_back(error.what());
    }
  }
  return found;
}

/// The same if the launcher has restarted the job; otherwise empty.
OfJob newest_after_restart(const std::string& folder, const JobStart& start,
                           std::set<std::string>& seen) {
  const bool looks = !start.job_id.empty() && start.restarts > 0 && !folder.empty();
  return looks ? newest_of_job(folder, start.job_id, seen) : OfJob();
}

/// The end of the note below if a value of the field that both runs use would keep the batch; empty
/// otherwise.
std::string how_to_keep_batch(const TrainConfig& saved, TrainConfig mine, const BatchSizes& full) {
  const auto& steps = saved.step_batch_size_schedule;
  if (steps.has_value() != mine.step_batch_size_schedule.has_value()) return "";
  mine.global_batch_size = saved.global_batch_size;
  mine.step_batch_size_schedule = steps;
  try {
    const int64_t ranks = full.global / full.num_microbatches / full.micro;
    const BatchSchedule fits(mine, ranks);
  } catch (const ConfigError&) {
    return "";
  }
  constexpr const char* kUse = "; to keep the batch, use --set train.";
  return steps ? fmt::format("{}step_batch_size_schedule='{}'", kUse, *steps)
               : fmt::format("{}global_batch_size={}", kUse, *saved.global_batch_size);
}

/// A note if a run that continues from a checkpoint takes another batch; empty otherwise.
std::string change_of_batch(CheckpointReader& checkpoint, const Trainer& trainer) {
  const BatchSizes& full = trainer.batches().full();
  const TrainConfig& mine = trainer.config().train;
  const TrainConfig saved = checkpoint.config().train;
  const auto& steps = saved.step_batch_size_schedule;
  const std::optional<int64_t> before =
      steps ? parse_step_batch_size_schedule(*steps).back().global : saved.global_batch_size;
  if (!before || *before == full.global) return "";
  const Manifest& manifest = checkpoint.manifest();
  return fmt::format(
      "train.{}: found {}, in '{}': {}; the schedules of the learning rate and the weight decay "
      "count samples, so they continue as after {} iterations with a batch of {}{}",
      mine.step_batch_size_schedule ? "step_batch_size_schedule" : "global_batch_size", full.global,
      checkpoint.path(), *before,
      (manifest.consumed_samples - manifest.skipped_samples) / full.global, full.global,
      how_to_keep_batch(saved, mine, full));
}

/// A note if the run that saved the checkpoint counted its decay in iterations, and this one, whose
/// batches change size, ends it with the samples of the run; empty otherwise.
std::string change_of_decay(CheckpointReader& checkpoint, const Trainer& trainer) {
  const OptimizerConfig& mine = trainer.config().optimizer;
  const std::optional<int64_t> before = checkpoint.config().optimizer.lr_decay_iters;
  if (mine.lr_decay_iters || !before) return "";
  const bool decays = mine.lr_decay_style != LrDecayStyle::constant;
  const bool weight_decay_grows = mine.weight_decay_incr_style != WeightDecayIncrStyle::constant;
  if (!decays && !weight_decay_grows) return "";
  return fmt::format(
      "optimizer.lr_decay_iters: found unset, in '{}': {}; {} with the samples of the run{}",
      checkpoint.path(), *before,
      !decays              ? "the weight decay's schedule ends"
      : weight_decay_grows ? "the decay and the weight decay's schedule end"
                           : "the decay ends",
      decays ? fmt::format("; to keep the decay, use --set optimizer.lr_decay_iters={}", *before)
             : "");
}

/// Rank 0 locks the folder for the run; all ranks fail if another run has it.
std::unique_ptr<FolderLock> lock_folder(const std::string& folder, const std::string& given_as,
                                        const ParallelState& state) {
  std::unique_ptr<FolderLock> lock;
  const auto take = [&] {
    lock = std::make_unique<FolderLock>(folder, given_as);
    return "";
  };
  as_rank_0_finds(state, take, "checkpoint lock");
  return lock;
}

/// Ignores errors: the next save tries again and reports what it cannot remove.
void remove_what_earlier_runs_left(const std::string& folder) {
  try {
    remove_leftovers(folder);
  } catch (const FileError&) {
  }
}

}  // namespace

std::string checkpoint_to_resume_from(const CheckpointConfig& config, const std::string& folder,
                                      const JobStart& start) {
  std::set<std::string> seen;
  const std::string of_job = newest_after_restart(folder, start, seen).path;
  if (!of_job.empty() || !config.load || config.finetune || !has_checkpoint(*config.load))
    return of_job;
  return find_checkpoint(*config.load);
}

RunCheckpoints::RunCheckpoints(const CheckpointConfig& config, std::string folder,
                               const ParallelState& parallel_state, JobStart start,
                               StateCopies* copies)
    : config_(config),
      start_(std::move(start)),
      folder_(std::move(folder)),
      state_(parallel_state),
      copies_(config.in_memory_replicas > 0 ? copies : nullptr) {
  if (copies_) begin_copies();
  require<ConfigError>(!folder_.empty() || !config.save_interval,
                       "checkpoint.save_interval: found {}, which needs checkpoint.save or "
                       "--output, which say where to save",
                       config.save_interval.value_or(0));
  if (folder_.empty()) return;
  lock_ = lock_folder(folder_, config.save ? "checkpoint.save" : "--output", state_);
  if (state_.rank() == 0) {
    remove_what_earlier_runs_left(folder_);
    note_earlier();
    if (!lock_->is_locked())
      add_note(
          fmt::format("the file system of '{}' has no locks: another run that saves there "
                      "would not be noticed",
                      folder_));
  }
  saver_ = std::make_shared<CheckpointSaver>(
      parallel_state, CheckpointSaverOptions{.folder = folder_,
                                             .keep = config.keep.value_or(0),
                                             .async = config.async_save,
                                             .when_busy = config.async_when_busy,
                                             .copy_in_background = true,
                                             .job_id = start_.job_id});
}

void RunCheckpoints::add_note(const std::string& text) {
  if (!text.empty()) note_ += (note_.empty() ? "" : "\n") + text;
}

std::string RunCheckpoints::note_loaded(const std::string& path, const std::string& folder,
                                        const Trainer& trainer) {
  path_ = path;
  loaded_ = path;
  loaded_iteration_ = trainer.iteration();
  if (state_.rank() != 0) return path;
  try {
    CheckpointReader checkpoint(path);
    if (loaded_whole_) {
      add_note(change_of_batch(checkpoint, trainer));
      add_note(change_of_decay(checkpoint, trainer));
    }
    add_note(doubt_about_newest(folder));
  } catch (const FileError&) {  // of what was read a moment ago
  }
  return path;
}

std::vector<std::string> RunCheckpoints::find_next_of_job(Found& found) const {
  OfJob mine;
  const auto find = [&] {
    mine = newest_after_restart(folder_, start_, found.seen);
    return mine.path;
  };
  found.of_job = as_rank_0_finds(state_, find, "checkpoint of the job");
  return mine.problems;
}

void RunCheckpoints::note_left_out(const std::vector<std::string>& problems, bool resumes_older) {
  for (const std::string& problem : problems)
    add_note(problem + (resumes_older ? "; the run resumes from an older checkpoint"
                                      : "; the run does not resume from it"));
}

RunCheckpoints::Found RunCheckpoints::look() {
  Found found;
  const bool looks_on_disk = !start_.job_id.empty() && !folder_.empty();
  if (looks_on_disk || copies_) {  // whatever the count, which hosts may know differently
    const std::vector<std::string> problems = find_next_of_job(found);
    const bool keeps_memory = start_.restarts > start_.requeues;  // a requeue does not
    if (copies_ && keeps_memory) found.copy = look_for_copy(found.of_job);
    note_left_out(problems, !found.copy && !found.of_job.empty());
  }
  if (!found.copy && found.of_job.empty() && config_.load)
    found.named = agree_on_checkpoint(*config_.load, state_);
  return found;
}

bool RunCheckpoints::will_load() {
  if (!found_) found_ = look();
  return found_->copy || !found_->of_job.empty() || !found_->named.empty();
}

/// All ranks see each failure, so all go on to the same checkpoint, which replaces whatever the one
/// before has left in the state.
bool RunCheckpoints::load_of_job(Trainer& trainer, Found& found) {
  const std::string path = found.of_job;
  try {
    require<FileError>(load_from(path, trainer, /*finetune=*/false),
                       "'{}' was removed while the job resumed from it", path);
    return true;
  } catch (const FileError& error) {
    std::vector<std::string> problems = find_next_of_job(found);
    if (found.of_job.empty()) throw;
    problems.insert(problems.begin(), std::string(error.what()));
    note_left_out(problems, /*resumes_older=*/true);
    return false;
  }
}

std::optional<std::string> RunCheckpoints::load_after_restart(Trainer& trainer, Found found) {
  if (found.copy && load_copy(trainer, found)) return kInMemory;
  while (!found.of_job.empty()) {
    const std::string path = found.of_job;
    if (load_of_job(trainer, found)) return note_loaded(path, folder_, trainer);
  }
  return {};
}

std::optional<std::string> RunCheckpoints::load(Trainer& trainer) {
  const Found found = found_ ? *std::exchange(found_, {}) : look();
  std::optional<std::string> loaded = load_after_restart(trainer, found);
  if (!loaded) loaded = load_named(trainer, found);
  find_origin(trainer);
  return loaded;
}

std::optional<std::string> RunCheckpoints::load_named(Trainer& trainer, const Found& found) {
  if (!config_.load) return {};
  std::string path = found.named;
  if (path.empty()) {
    require<FileError>(config_.load_if_present,
                       "checkpoint.load: '{}' holds no complete checkpoint; "
                       "set checkpoint.load_if_present = true to start from initial weights",
                       *config_.load);
    return {};
  }
  while (!load_from(path, trainer, config_.finetune)) {
    const std::string removed = path;
    path = agree_on_checkpoint(*config_.load, state_);
    require<FileError>(!path.empty(),
                       "checkpoint.load: '{}' was removed while it was read, and '{}' holds no "
                       "other complete checkpoint",
                       removed, *config_.load);
  }
  return note_loaded(path, *config_.load, trainer);
}

bool RunCheckpoints::load_from(const std::string& path, Trainer& trainer, bool finetune) {
  SharedCheckpoint checkpoint(path, state_);
  bool weights_only = finetune;
  const bool opened = checkpoint.read([&](CheckpointReader& reader) {
    const bool starts_adapters = trainer.starts_adapters(reader);
    if (!finetune) check_same_model(reader, trainer.config(), starts_adapters);
    weights_only = finetune || starts_adapters;
  });
  if (!opened) return false;
  check_no_weight_left(checkpoint.reader(), trainer.state(/*with_optimizer=*/false), state_);
  if (!checkpoint.read([&](CheckpointReader& reader) { trainer.read(reader, weights_only); }))
    return false;
  trainer.go_on_from(checkpoint.reader(), weights_only);
  loaded_whole_ = !weights_only;
  return true;
}

bool RunCheckpoints::save_is_due(int64_t iteration) const {
  return saver_ && config_.save_interval && iteration % *config_.save_interval == 0;
}

bool RunCheckpoints::copy_is_due(int64_t iteration) const {
  return copier_ && iteration % config_.in_memory_interval == 0;
}

bool RunCheckpoints::is_due(int64_t iteration) const {
  return save_is_due(iteration) || copy_is_due(iteration);
}

bool RunCheckpoints::saves(int64_t iteration, bool last) const {
  return saver_ && (last || save_is_due(iteration));
}

std::string RunCheckpoints::after_iteration(Trainer& trainer, bool last) {
  if (!last && copy_is_due(trainer.iteration())) copy(trainer);
  if (!saves(trainer.iteration(), last)) return "";
  try {
    return save(trainer, last);
  } catch (const FileError& error) {
    if (last) throw;
    return fmt::format("no checkpoint after iteration {}, training continues: {}",
                       trainer.iteration(), error.what());
  }
}

std::string RunCheckpoints::finish() {
  try {
    return saver_ ? saver_->finish() : "";
  } catch (const FileError& error) {
    return fmt::format("the last checkpoint failed: {}", error.what());
  }
}

std::string RunCheckpoints::save(Trainer& trainer, bool last) {
  const bool proven = trainer.end() == RunEnd::done && trainer.config().train.eval_iters > 0;
  const SaveResult result = saver_->save(trainer.state(config_.save_optim), trainer.progress(),
                                         trainer.config(), /*may_skip=*/!last,
                                         /*unproven=*/!proven);
  const std::string last_problem = last ? saver_->finish() : "";
  if (config_.async_save && !last)
    trainer.before_next_update([saver = saver_] { saver->finish_copy(); });
  if (!result.path.empty()) path_ = result.path;
  std::string told;
  if (!result.last_error.empty())
    told = "the checkpoint before this one failed: " + result.last_error + "\n";
  for (const std::string& problem : {result.problem, last_problem})
    if (!problem.empty()) told += problem + "\n";
  if (result.path.empty()) return told + "no checkpoint: the last one is still being written";
  return told + (config_.async_save && !last ? "saving " : "saved ") + result.path;
}

}  // namespace lockstep
