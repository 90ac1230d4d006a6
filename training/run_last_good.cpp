#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/manifest.h"
#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/training/run_checkpoints.h"

namespace lockstep {
namespace {

/// Tells apart saves of the same step.
std::filesystem::file_time_type completed_at(const std::string& checkpoint) {
  std::error_code gone;
  return std::filesystem::last_write_time(checkpoint + "/" + kManifestName, gone);
}

bool is_step_in(const std::string& checkpoint, const std::string& folder) {
  std::filesystem::path path = std::filesystem::absolute(checkpoint);
  if (!path.has_filename()) path = path.parent_path();
  std::error_code gone;
  return std::filesystem::equivalent(path.parent_path(), folder, gone);
}

/// The step of a checkpoint that the job has saved. None also if it cannot be read.
std::optional<int64_t> step_of_job(const std::string& checkpoint, const std::string& job_id) {
  try {
    const CheckpointReader reader(checkpoint);
    const Manifest& manifest = reader.manifest();
    if (manifest.job_id == job_id) return manifest.iteration;
  } catch (const FileError&) {
  }
  return {};
}

}  // namespace

void RunCheckpoints::note_earlier() {
  try {
    for (const std::string& path : complete_checkpoints(folder_))
      earlier_.insert(completed_at(path));
  } catch (const FileError&) {
  }
}

bool RunCheckpoints::is_of_run(const std::string& path) const {
  if (!earlier_.contains(completed_at(path))) return true;
  return !origin_ && loaded_ && loaded_whole_ && is_step_in(*loaded_, folder_) &&
         !newest_until({path}, loaded_iteration_).empty();
}

/// In a folder where other runs may save, the newest may have been another one at the job's start.
std::optional<std::string> RunCheckpoints::origin_of_job(const Trainer& trainer) const {
  const std::string& named = *config_.load;
  const bool is_one = is_checkpoint(named);
  for (const std::string& path : is_one ? std::vector{named} : complete_checkpoints(named)) try {
      CheckpointReader checkpoint(path);
      if (checkpoint.manifest().job_id == start_.job_id) continue;
      const bool is_certain = is_one || is_step_in(path, folder_);
      if (is_certain && (config_.finetune || trainer.starts_adapters(checkpoint))) return path;
      return {};
    } catch (const FileError&) {  // nothing can start from it any more
    }
  return {};
}

std::set<int64_t> RunCheckpoints::take_steps_of_job(int64_t iteration) {
  std::set<int64_t> steps;
  for (const std::string& path : complete_checkpoints(folder_)) {
    const std::optional<int64_t> step = step_of_job(path, start_.job_id);
    if (!step || *step > iteration) continue;
    steps.insert(*step);
    earlier_.erase(completed_at(path));
  }
  return steps;
}

/// Ignores errors: a run that cannot read its folder learns of it when it saves.
void RunCheckpoints::find_origin(const Trainer& trainer) {
  if (state_.rank() != 0 || !config_.load) return;
  const bool is_restart = !start_.job_id.empty() && start_.restarts > 0;
  try {
    if (loaded_ && !loaded_whole_)
      origin_ = loaded_;
    else if (is_restart)
      origin_ = origin_of_job(trainer);
    if (!origin_ || !saver_) return;
    std::set<int64_t> saved;
    if (is_restart) saved = take_steps_of_job(trainer.iteration());
    if (is_step_in(*origin_, folder_))
      saver_->note_origin(CheckpointReader(*origin_).manifest().iteration, std::move(saved));
  } catch (const FileError&) {
  }
}

bool RunCheckpoints::is_there(const std::optional<std::string>& before) const {
  return before && is_checkpoint(*before) &&
         (!is_step_in(*before, folder_) || earlier_.contains(completed_at(*before)));
}

std::string RunCheckpoints::known_until(int64_t iteration) const {
  if (!folder_.empty()) {
    std::vector<std::string> own = complete_checkpoints(folder_);
    std::erase_if(own, [this](const std::string& path) { return !is_of_run(path); });
    const std::string saved = newest_until(own, iteration);
    if (!saved.empty()) return saved;
  }
  if (loaded_iteration_ <= iteration && is_there(loaded_)) return *loaded_;
  return iteration >= 0 && is_there(origin_) ? *origin_ : "";
}

std::string RunCheckpoints::describe_last_good(const Trainer& trainer) const {
  const int64_t good = trainer.last_good_iteration();
  const std::string last = known_until(good), earlier = known_until(good - 1);
  if (last.empty()) return "";
  const bool in_doubt = trainer.loss_scale_is_in_doubt() && !earlier.empty() && earlier != last;
  return fmt::format(
      "the last checkpoint before that is '{}'{}", last,
      in_doubt ? "; if its weights are the cause and not the loss scale, it is '" + earlier + "'"
               : "");
}

bool RunCheckpoints::can_go_back_to(const std::string& path) const {
  if (path.empty() || !is_checkpoint(path)) return false;
  if (path == origin_ && is_there(origin_)) return false;
  return path == loaded_ || is_of_run(path);
}

std::string RunCheckpoints::place_to_go_back_to(int64_t iteration) const {
  if (path_.empty() || can_go_back_to(path_)) return path_;
  const std::string known = known_until(iteration);
  return can_go_back_to(known) ? known : "";
}

std::string RunCheckpoints::go_back(Trainer& trainer) {
  finish();
  const std::string mine = state_.rank() == 0 ? place_to_go_back_to(trainer.iteration()) : "";
  const std::string path =
      all_gather_texts(state_.world(), mine, "checkpoint to go back to").front();
  if (path.empty()) return "";
  abandon_copies();
  const bool resumed = loaded_whole_;
  require<FileError>(load_from(path, trainer, /*finetune=*/false),
                     "train.on_spike: the run cannot rewind to '{}', which was removed", path);
  loaded_whole_ = resumed;
  return path;
}

}  // namespace lockstep
