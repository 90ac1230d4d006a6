#include "lockstep/checkpoint/copy_loader.h"
#include "lockstep/checkpoint/rewind_record.h"
#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/training/run_checkpoints.h"

namespace lockstep {
namespace {

constexpr const char* kNotFromMemory = "; the run does not resume from the ranks' memory";
constexpr const char* kNoneOnDisk =
    "; the run resumes from the ranks' memory and has no checkpoint until it saves one";
/// What rank 0 tells before the path instead of the iteration, if the run took only the weights.
constexpr const char* kWeights = "weights";

}  // namespace

void RunCheckpoints::begin_copies() {
  const int64_t others = state_.world_size() - 1;
  if (others < config_.in_memory_replicas)
    note_ = fmt::format("checkpoint.in_memory_replicas: found {}, other ranks left: {}",
                        config_.in_memory_replicas, others);
  if (others > 0)
    copier_ = std::make_unique<StateCopier>(state_, *copies_, config_.in_memory_replicas,
                                            start_.restarts);
}

/// A lone rank makes no copy: it would be lost with the rank.
void RunCheckpoints::copy(Trainer& trainer) {
  if (copier_)
    copier_->copy(trainer.state(/*with_optimizer=*/true), trainer.progress(), trainer.config());
}

std::string RunCheckpoints::read_copy(CopyLoader& loader, Trainer& trainer) const {
  const std::string failure = loader.read(
      [&](CheckpointReader& checkpoint) { trainer.read(checkpoint, /*weights_only=*/false); });
  if (!failure.empty()) return failure;
  try {
    trainer.go_on_from(loader.checkpoint(), /*weights_only=*/false);
  } catch (const FileError& error) {
    return error.what();
  }
  return "";
}

void RunCheckpoints::note_copy(const std::string& problem) { add_note(problem + kNotFromMemory); }

CopyId RunCheckpoints::first_that_counts() {
  if (state_.rank() != 0 || folder_.empty()) return {};
  try {
    return first_copy_that_counts(folder_, start_.job_id);
  } catch (const FileError& error) {
    note_copy(error.what());
    return {start_.restarts, 0};
  }
}

void RunCheckpoints::abandon_copies() {
  if (!copies_) return;
  copies_->clear();
  if (state_.rank() != 0 || folder_.empty()) return;
  try {
    record_rewind(folder_, start_.job_id, copier_ ? copier_->next() : CopyId{start_.restarts, 0});
  } catch (const FileError&) {
  }
}

std::shared_ptr<CopyLoader> RunCheckpoints::look_for_copy(const std::string& on_disk) {
  const bool reads = state_.rank() == 0 && !on_disk.empty();
  const int64_t least = reads ? CheckpointReader(on_disk).manifest().iteration : 0;
  auto loader = std::make_shared<CopyLoader>(state_, *copies_, least, first_that_counts());
  if (loader->id()) return loader;
  if (!loader->no_copy_reason().empty()) note_copy(loader->no_copy_reason());
  copies_->clear();
  return nullptr;
}

bool RunCheckpoints::load_copy(Trainer& trainer, const Found& found) {
  const std::string problem = read_copy(*found.copy, trainer);
  if (!problem.empty()) {
    copies_->clear();
    require<FileError>(!found.of_job.empty(), "{}{}", problem, kNotFromMemory);
    note_copy(problem);
    return false;
  }
  copies_->keep_only(*found.copy->id());
  copy(trainer);
  find_checkpoint_on_disk(trainer);
  return true;
}

/// After a spike, the run goes back to what it would have resumed from without the copy. Only rank
/// 0 reads it, and what is wrong with it is a note: the state is here already.
void RunCheckpoints::find_checkpoint_on_disk(const Trainer& trainer) {
  std::string mine;
  if (state_.rank() == 0) {
    try {
      const std::string path = checkpoint_to_resume_from(config_, folder_, start_);
      if (!path.empty()) {
        CheckpointReader checkpoint(path);
        mine = fmt::format("{} {}",
                           trainer.starts_adapters(checkpoint)
                               ? kWeights
                               : std::to_string(checkpoint.manifest().iteration),
                           path);
      }
    } catch (const FileError& error) {
      add_note(std::string(error.what()) + kNoneOnDisk);
    }
  }
  const std::string found =
      all_gather_texts(state_.world(), mine, "checkpoint to go back to").front();
  loaded_whole_ = !found.starts_with(kWeights);
  if (found.empty()) return;
  if (loaded_whole_) loaded_iteration_ = std::stoll(found);
  path_ = found.substr(found.find(' ') + 1);
  loaded_ = path_;
}

}  // namespace lockstep
