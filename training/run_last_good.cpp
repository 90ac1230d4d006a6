#include <filesystem>
#include <string>
#include <system_error>
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
  return loaded_ && loaded_whole_ && is_step_in(*loaded_, folder_) &&
         !newest_until({path}, loaded_iteration_).empty();
}

void RunCheckpoints::spare_origin(const CheckpointReader& loaded) {
  if (saver_ && is_step_in(loaded.path(), folder_))
    saver_->note_origin(loaded.manifest().iteration);
}

bool RunCheckpoints::is_loaded_there() const {
  return loaded_ && is_checkpoint(*loaded_) &&
         (!is_step_in(*loaded_, folder_) || earlier_.contains(completed_at(*loaded_)));
}

std::string RunCheckpoints::known_until(int64_t iteration) const {
  if (!folder_.empty()) {
    std::vector<std::string> own = complete_checkpoints(folder_);
    std::erase_if(own, [this](const std::string& path) { return !is_of_run(path); });
    const std::string saved = newest_until(own, iteration);
    if (!saved.empty()) return saved;
  }
  return loaded_iteration_ <= iteration && is_loaded_there() ? *loaded_ : "";
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

std::string RunCheckpoints::go_back(Trainer& trainer) {
  finish();
  if (copies_) copies_->clear();
  std::string mine = path_;
  const auto can_go_back_to_it = [&] {
    return is_checkpoint(mine) && (mine == loaded_ || is_of_run(mine));
  };
  if (state_.rank() == 0 && !mine.empty() && !can_go_back_to_it())
    mine = known_until(trainer.iteration());
  const bool resumed = loaded_whole_;
  if (!resumed && loaded_ == mine) mine.clear();
  const std::string path =
      all_gather_texts(state_.world(), mine, "checkpoint to go back to").front();
  if (path.empty()) return "";
  require<FileError>(load_from(path, trainer, /*finetune=*/false),
                     "train.on_spike: the run cannot rewind to '{}', which was removed", path);
  loaded_whole_ = resumed;
  return path;
}

}  // namespace lockstep
