#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/checkpoint/checkpoint_saver.h"
#include "lockstep/checkpoint/folder_lock.h"
#include "lockstep/checkpoint/state_copier.h"
#include "lockstep/core/config.h"
#include "lockstep/parallel_state/job_start.h"
#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/training/trainer.h"

namespace lockstep {

class CopyLoader;

/// The checkpoint from which a run resumes now, as far as this process alone can tell; empty if it
/// starts from initial weights. See RunCheckpoints::load().
std::string checkpoint_to_resume_from(const CheckpointConfig& config, const std::string& folder,
                                      const JobStart& start);

/// Does what the fields of `checkpoint` in a run's configuration ask for: loading at the start,
/// saving and copying during the run, saving at the end. Every rank has one and makes the same
/// calls.
class RunCheckpoints {
 public:
  /// `folder` is where to save; empty: nowhere. Collective; as long as this object lives, no other
  /// run can save there. Removes what interrupted saves and removals left there. ConfigError:
  /// checkpoint.save_interval without a folder. FileError, on all ranks:
  /// another run has the folder, or it cannot be made. With `copies`, which must outlive this
  /// object, checkpoint.in_memory_replicas takes effect.
  RunCheckpoints(const CheckpointConfig& config, std::string folder,
                 const ParallelState& parallel_state, JobStart start = {},
                 StateCopies* copies = nullptr);

  /// Whether load() will replace all weights except those of adapters, or throw. If so, the run may
  /// be built without initial values. Collective.
  bool will_load();

  /// If the launcher has restarted the job, and the ranks have in memory a copy of the state that
  /// is whole and at least as new as the job's newest checkpoint, the run resumes from the copy, a
  /// new copy is made at once, and kInMemory is returned. If not, note() says why.
  ///
  /// If the launcher has restarted the job and `folder` has complete checkpoints of the job, the
  /// run resumes from the newest of these that all ranks can read, whatever the configuration says;
  /// note() names newer ones. Otherwise it loads what checkpoint.load names. Returns the
  /// checkpoint's path, or nothing if there is none to load. Rank 0 decides which is the newest; if
  /// the one of checkpoint.load is removed while it is read, a later one is taken. FileError: there
  /// is none and checkpoint.load_if_present is not set; other ranks find none, or another one,
  /// under its path; it, or the last of the job's, is damaged or of another model; it has no state
  /// of the optimizer and checkpoint.finetune is not set. From a checkpoint without adapters, a run
  /// with lora.rank loads only the weights, as with checkpoint.finetune. ConfigError without
  /// checkpoint.finetune: a field of `model` that differs from the saved one and changes what the
  /// weights mean, such as the number of heads.
  std::optional<std::string> load(Trainer& trainer);
  static constexpr const char* kInMemory = "the ranks' memory";
  /// Notes to the user, in lines: about the folder, about checkpoints that could not be read, and
  /// about load(), such as a batch that differs from that of the checkpoint that the run continues.
  const std::string& note() const { return note_; }

  /// Goes back to the checkpoint that this run saved last, else to the one that it resumed from,
  /// not to one of which it took only the weights. Returns its path; empty if there is none. Waits
  /// for a save in progress; if that fails, the one before counts. To learn of the failure, call
  /// finish() first. Collective. FileError as for load(). Copies in memory are of the state that
  /// the run abandons, so they are dropped, also those of ranks that take no part now and look at
  /// `folder` later.
  std::string go_back(Trainer& trainer);

  /// Whether an interval asks for a save or a copy after that iteration.
  bool is_due(int64_t iteration) const;
  /// Whether after_iteration() will save.
  bool saves(int64_t iteration, bool last) const;

  /// Copies and saves if the intervals ask for it; saves at the end of the run if that is asked
  /// for. Returns what to tell the user. If a save during the run fails, that is reported and the
  /// run continues; FileError if the save at the end fails.
  std::string after_iteration(Trainer& trainer, bool last);

  /// Waits for the save in progress. Returns what to tell the user about it. Collective.
  std::string finish();

  /// For a run that diverged: "the last checkpoint from before is '...'", that of
  /// Trainer::last_good_iteration() or before, else the one whose weights it started with; empty if
  /// this run has none. If the loss scale is in doubt, also the checkpoint before that one, in case
  /// the weights are at fault. For rank 0.
  std::string describe_last_good(const Trainer& trainer) const;

  /// The checkpoint that was saved last, else the one that was loaded; empty if there was none.
  const std::string& path() const { return path_; }

 private:
  /// Returns whether all ranks could read it: it may belong to another run, which has meanwhile
  /// removed it or saved that step again. FileError on all ranks if neither is the case and they
  /// see different checkpoints. Collective.
  bool load_from(const std::string& path, Trainer& trainer, bool finetune);
  std::string known_until(int64_t iteration) const;
  /// Fills earlier_. Ignores errors: the next save reports them.
  void note_earlier();
  /// Whether a checkpoint in the folder is not one that another run has left there: this run has
  /// saved it, or has resumed from it or from a later one. For rank 0.
  bool is_of_run(const std::string& path) const;
  /// The checkpoints and copies with which load() begins.
  struct Found {
    std::shared_ptr<CopyLoader> copy;  ///< null: none is whole
    std::string of_job;                ///< the newest checkpoint that the job has saved
    std::string named;                 ///< by checkpoint.load; looked for if there is neither
    std::set<std::string> seen;        ///< by rank 0, while it looked for of_job
  };
  Found look();
  /// Changes found.of_job to the newest that was not seen yet. Returns why newer ones are left out,
  /// on rank 0. Collective.
  std::vector<std::string> find_next_of_job(Found& found) const;
  void note_left_out(const std::vector<std::string>& problems, bool resumes_older);
  std::optional<std::string> load_after_restart(Trainer& trainer, Found found);
  /// Whether found.of_job could be loaded. If not, it is the next one afterwards; FileError on all
  /// ranks if there is none.
  bool load_of_job(Trainer& trainer, Found& found);
  std::optional<std::string> load_named(Trainer& trainer, const Found& found);
  void add_note(const std::string& text);
  /// Call it after load_from(): remembers what was loaded, and adds notes about it and about the
  /// folder where it was found. Returns `path`.
  std::string note_loaded(const std::string& path, const std::string& folder,
                          const Trainer& trainer);
  /// After loading: fills origin_, which stays in the folder as KeptSteps::origin.
  void find_origin(const Trainer& trainer);
  /// What checkpoint.load meant when the job took only its weights, before it was restarted.
  std::optional<std::string> origin_of_job(const Trainer& trainer) const;
  /// The steps that the job has saved in the folder until then. They no longer count as earlier_.
  std::set<int64_t> take_steps_of_job(int64_t iteration);
  /// Whether a checkpoint from before this start is still there, and this run has not saved that
  /// step anew. For rank 0.
  bool is_there(const std::optional<std::string>& before) const;
  /// Whether a checkpoint holds a whole state of this run. For rank 0.
  bool can_go_back_to(const std::string& path) const;
  std::string place_to_go_back_to(int64_t iteration) const;
  /// Whether the run resumes from the copy in memory; throws if it cannot and the job has no
  /// checkpoint on disk.
  bool load_copy(Trainer& trainer, const Found& found);
  void find_checkpoint_on_disk(const Trainer& trainer);
  std::shared_ptr<CopyLoader> look_for_copy(const std::string& on_disk);
  std::string read_copy(CopyLoader& loader, Trainer& trainer) const;
  void note_copy(const std::string& problem);
  /// What first_copy_that_counts() finds on rank 0; if that fails, a copy that is yet to be made.
  CopyId first_that_counts();
  /// Drops the copies, and records that for ranks that take no part now. Ignores errors of the
  /// record; the copies of ranks that wait may then come back.
  void abandon_copies();
  void begin_copies();
  void copy(Trainer& trainer);
  bool save_is_due(int64_t iteration) const;
  bool copy_is_due(int64_t iteration) const;
  std::string save(Trainer& trainer, bool last);

  CheckpointConfig config_;
  JobStart start_;
  std::string folder_;
  std::string path_;
  std::optional<std::string> loaded_;
  int64_t loaded_iteration_ = 0;
  bool loaded_whole_ = false;  ///< not only its weights
  /// The checkpoint whose weights the run had at its iteration 0, if it took only the weights, in
  /// this start or before a restart. Of rank 0.
  std::optional<std::string> origin_;
  ParallelState state_;
  std::unique_ptr<FolderLock> lock_;  ///< of rank 0
  /// When the checkpoints became complete that rank 0 found in the folder at the start.
  std::set<std::filesystem::file_time_type> earlier_;
  std::shared_ptr<CheckpointSaver> saver_;
  StateCopies* copies_;                  ///< null: none are made
  std::unique_ptr<StateCopier> copier_;  ///< null: none are made
  std::string note_;
  std::optional<Found> found_;  ///< by will_load(), for the load() that follows
};

}  // namespace lockstep
