#include "lockstep/checkpoint/copy_loader.h"
#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/training/run_checkpoints.h"

namespace lockstep {
namespace {

constexpr const char* kNotFromMemory = "; the run does not resume from the ranks' memory";

}  // namespace

void RunCheckpoints::begin_copies() {
  const int64_t others = state_.world_size() - 1;
  if (others < config_.in_memory_replicas)
    note_ = fmt::format("checkpoint.in_memory_replicas: found {}, ranks left beside each: {}",
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

void RunCheckpoints::note_copy(const std::string& problem) {
  note_ += (note_.empty() ? "" : "\n") + problem + kNotFromMemory;
}

std::shared_ptr<CopyLoader> RunCheckpoints::look_for_copy(const std::string& on_disk) {
  const bool reads = state_.rank() == 0 && !on_disk.empty();
  const int64_t least = reads ? CheckpointReader(on_disk).manifest().iteration : 0;
  auto loader = std::make_shared<CopyLoader>(state_, *copies_, least);
  if (loader->id()) return loader;
  if (!loader->why_none().empty()) note_copy(loader->why_none());
  copies_->clear();
  return nullptr;
}

/// After a spike, the run goes back to what it would have resumed from without the copy.
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
  const std::string mine =
      state_.rank() == 0 ? checkpoint_to_resume_from(config_, folder_, start_) : "";
  path_ = all_gather_texts(state_.world(), mine, "checkpoint to go back to").front();
  loaded_whole_ = true;
  if (path_.empty()) return true;
  loaded_ = path_;
  loaded_iteration_ = CheckpointReader(path_).manifest().iteration;
  return true;
}

}  // namespace lockstep
