#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/training_state.h"
#include "lockstep/core/config.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

struct CheckpointSaverOptions {
  std::string folder;  ///< visible to all ranks
  int64_t keep = 0;    ///< newest checkpoints to keep; 0: all; see KeptSteps
  /// save() returns once the state is copied to host memory or, for state on a device, once the
  /// copy is launched.
  bool async = false;
  AsyncWhenBusy when_busy = AsyncWhenBusy::wait;
  /// With `async`: the thread also copies state on the CPU, which must not change before
  /// finish_copy().
  bool copy_in_background = false;
  std::string job_id = {};  ///< written to the manifests
};

/// The result of save().
struct SaveResult {
  std::string path;        ///< of the checkpoint; empty if it was skipped
  std::string last_error;  ///< why the save before this one failed, with `async`; else empty
  /// What went wrong besides this save (with `async`, the save before): an old checkpoint that
  /// cannot be removed. Else empty.
  std::string problem;
};

/// Writes checkpoints. Every rank writes one file with its share of the state: each element is
/// written once, by one of the ranks that hold it, and the work is spread evenly over them. Rank 0
/// adds the configuration and, when all are done, the manifest, which completes the checkpoint; see
/// checkpoint_folder.h. The state that is saved must have the same names and parts every time.
///
/// With `async` a thread on each rank writes from a copy of the rank's share; the memory of the
/// copy is reused by the next save. The ranks' threads synchronize through files in the
/// checkpoint's folder, so they do not get in the way of the training's communication. State on a
/// device is copied to page-locked memory, with a second buffer once it is needed: if the last save
/// is still being written, the next one is copied at once and written after it.
class CheckpointSaver {
 public:
  CheckpointSaver(const ParallelState& parallel_state, CheckpointSaverOptions options);
  /// Gives up what is not complete; it stays unfinished. Waits for this rank's thread, which ends
  /// after the block that it is writing, or the fsync that it is waiting for.
  ~CheckpointSaver();
  CheckpointSaver(const CheckpointSaver&) = delete;
  CheckpointSaver& operator=(const CheckpointSaver&) = delete;

  /// Saves `tensors` as the state after progress.iteration. Collective over the world. All ranks
  /// throw FileError if any of them failed: earlier checkpoints are unchanged, and the next save
  /// may be tried. They throw once no rank writes any more; if the disk of a rank does not answer
  /// within the group's timeout, only that rank waits on. The error is a DivergenceError if a
  /// weight is not finite. With `async` a failure is reported by the next save() or finish() after
  /// it is known; by a save() that fails, too, in its message. `may_skip`: options.when_busy
  /// decides what to do while the last save is in progress; for state on a device, to wait means to
  /// wait for the save before the last. A save that has failed on any rank is in progress on none.
  /// Without `may_skip` this save waits for all earlier ones.
  /// `unproven`: no loss has been computed with these weights yet, so the newest checkpoint before
  /// this one is kept, too.
  /// FileError on all ranks: `tensors` are not those of the first save, with the same names and
  /// parts in the same order.
  /// UsageError on all ranks, by the first save: a tensor of a dtype that safetensors lacks, or one
  /// that is StateTensor::on_one_stage and is found on two pipeline stages, or twice on a rank.
  SaveResult save(const std::vector<StateTensor>& tensors, const TrainingProgress& progress,
                  const Config& config, bool may_skip = false, bool unproven = false);

  /// The run has started with the weights of that step in the folder, and has then saved the steps
  /// `saved`; see KeptSteps::origin. Call it before the first save().
  void note_origin(int64_t step, std::set<int64_t> saved = {}) {
    origin_ = step;
    saved_ = std::move(saved);
  }

  /// Waits until the last save has copied what it writes. For this rank alone.
  void finish_copy();

  /// Waits until all saves are complete. Collective. FileError as save(), of the first that failed.
  /// Returns their SaveResult::problem.
  std::string finish();

 private:
  struct Job;

  /// Waits for the first of jobs_. As finish().
  std::string finish_first();
  /// Waits until there are fewer than `most` jobs, none of them for `iteration`, and collects the
  /// results of those that have ended.
  void make_room(size_t most, int64_t iteration, SaveResult& result);
  /// A job, not yet started. On rank 0 makes its folder, unless it must wait for another job.
  /// Collective; FileError on all ranks.
  std::unique_ptr<Job> begin(const std::vector<StateTensor>& tensors,
                             const TrainingProgress& progress, const Config& config,
                             SaveResult& result);
  std::unique_ptr<Job> make_job(const std::vector<StateTensor>& tensors,
                                const TrainingProgress& progress, const Config& config);
  void check_list(const std::vector<StateTensor>& tensors) const;
  void stage(Job& job, const at::Tensor& values) const;
  void note_staged(Job& job, c10::Device device);
  /// Memory, not read by any job, for the copy of this rank's share; kept from save to save.
  at::Tensor staging_for(const std::vector<StateTensor>& tensors);
  /// Whether any rank still works on jobs_ and none has failed.
  bool is_in_progress() const;

  ParallelState state_;
  CheckpointSaverOptions options_;
  std::optional<int64_t> origin_;  ///< see note_origin()
  std::set<int64_t> saved_;        ///< if there is one; the jobs change it one after another
  std::vector<size_t> mine_;       ///< indices of the tensors that this rank writes
  std::vector<std::string> keys_;  ///< of the tensors of the first save
  bool planned_ = false;
  std::vector<at::Tensor> staging_;        ///< bytes
  std::deque<std::unique_ptr<Job>> jobs_;  ///< under way, as many on all ranks, the first in front
};

}  // namespace lockstep
