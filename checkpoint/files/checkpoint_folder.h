#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

/// The folder that checkpoint.save names:
///
///     step_500/                 a complete checkpoint: it has a manifest
///     step_600.partial/         one that is being written, or that was interrupted
///     step_400.removed.partial/ one that is being removed
///     step_500.old.partial/     one that another is about to replace; see below
///     step_0.companions.partial/  files beside step_0/ that an import replaces together with it
///     lock                      of the run that saves there; see folder_lock.h
///     rewound                   which copies in memory count; see rewind_record.h
///     latest                    names of the steps in the order of their saving, the newest first
///
/// A checkpoint is written into step_N.partial/, each file followed by fsync, the manifest last;
/// then the folder is renamed, atomically even if step_N/ already existed, and `latest` is
/// replaced. So at any moment the newest complete checkpoint is the old or the new one, whole. If
/// the run ends before `latest` is replaced, the next save goes on from the list in latest.partial.
/// On a file system that cannot exchange two folders (NFS) it takes two steps: step_N/ becomes
/// step_N.old.partial/, then step_N.partial/ becomes step_N/. Between the two, and after a run that
/// ended there, the checkpoint is found in step_N.old.partial/; the next save or start restores its
/// name.
///
/// Any step_*.partial is removed by the next save, and at the start of the next run that may save
/// there; the files of an import that did not get to replace its checkpoint are put
/// back before. A folder step_N/ without a manifest is left alone: it is not known whether a run or
/// a person created it, or whether its manifest was lost. No save that is interrupted leaves one; a
/// save of that step fails as long as it is there. Needs no libtorch.
namespace lockstep {

/// "step_12"
std::string step_name(int64_t iteration);

/// Whether `folder` is a complete checkpoint itself. FileError, here and below, if that cannot be
/// determined: an unreadable checkpoint is not the same as a missing one.
bool is_checkpoint(const std::string& folder);

/// The folders of complete checkpoints in `folder`, the newest first: in the order of `latest`,
/// then, for those that it does not name, by iteration. Empty if there is none, or no folder.
/// FileError: the folder cannot be read; `latest` is not a regular file.
std::vector<std::string> complete_checkpoints(const std::string& folder);

/// The checkpoint that `folder` refers to: `folder` itself if it is one, otherwise the newest in
/// it. FileError if there is none.
std::string find_checkpoint(const std::string& folder);

/// Why find_checkpoint() may have missed the newest: `latest` begins with a name that does not
/// exist, and a checkpoint of a later iteration than the one found is not listed. Interrupted saves
/// do not cause this; a damaged `latest` does. Empty if there is no such doubt.
std::string doubt_about_newest(const std::string& folder);

/// The first of complete_checkpoints() whose step is at most `iteration`; empty if there is none.
std::string newest_until(const std::vector<std::string>& checkpoints, int64_t iteration);

/// Whether find_checkpoint() finds one.
bool has_checkpoint(const std::string& folder);

/// Removes what interrupted saves and removals left in `folder`, which must be locked. Returns what
/// cannot be removed and why; empty if there is nothing. FileError names what failed.
std::string remove_leftovers(const std::string& folder);

/// Which checkpoints stay in a folder when another one is complete. A run that diverges resumes
/// from one of them.
struct KeptSteps {
  int64_t keep = 0;  ///< the newest; 0: all
  /// The newest from before the last `skipped_steps` iterations stays, too: their updates were
  /// skipped. Checkpoints saved since then hold the same weights, but may hold a loss scale that
  /// has fallen, and count towards `keep`.
  int64_t skipped_steps = 0;
  /// Also one from an iteration earlier, because the weights of the last step that was not skipped
  /// have not yet given a finite loss and gradient.
  bool unproven = false;
  /// The step in the folder whose weights the run started with, at its iteration 0. It stays as
  /// long as the run has saved neither this step nor one that is old enough. Needs `saved`.
  std::optional<int64_t> origin = {};
  /// The steps that the run has saved; commit() adds its own. Others in the folder are of other
  /// runs. null: all are of this run.
  std::set<int64_t>* saved = nullptr;
};

/// A checkpoint that is being written.
class PartialCheckpoint {
 public:
  /// Only names it; creates nothing.
  PartialCheckpoint(std::string folder, int64_t iteration);

  /// Creates the empty folder that it is written in, after removing what interrupted saves and
  /// removals left. Returns what cannot be removed and why; empty if there is nothing. FileError
  /// names what failed, or what is at path() and is no complete checkpoint.
  std::string begin() const;
  /// Writes the manifest, which completes the checkpoint and replaces an earlier one of the same
  /// iteration. FileError: it is not complete. Then removes all checkpoints except those that are
  /// `kept`. Returns what cannot be removed and why; empty if there is nothing.
  std::string commit(std::string_view manifest, const KeptSteps& kept = {}) const;
  /// Removes what was written. Never throws.
  void discard() const noexcept;

  /// Path of one of its files, before the folder has its final name.
  std::string file(const std::string& name) const { return partial_ + "/" + name; }
  /// The folder, once complete.
  const std::string& path() const { return final_; }

 private:
  void complete(std::string_view manifest) const;
  std::string remove_old(const KeptSteps& kept) const;

  std::string folder_;
  int64_t iteration_;
  std::string name_;
  std::string final_;
  std::string partial_;
};

/// A file that is written from front to back. The disk starts writing while more data arrives.
class FileWriter {
 public:
  /// Creates the file. A file or a link of that name is removed first, never followed or written
  /// into; anything else is refused. FileError names the path, here and below.
  explicit FileWriter(std::string path);
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  void write(std::string_view bytes);
  /// Waits until everything is on disk, and closes the file.
  void finish();

 private:
  [[noreturn]] void fail_to_write() const;

  std::string path_;
  int file_ = -1;
  int64_t written_ = 0;
  int64_t begun_ = 0;  ///< bytes that the disk was told to write
};

/// Writes a whole file and waits until it is on disk. FileError names the path.
void write_file(const std::string& path, const std::vector<std::string_view>& pieces);

}  // namespace lockstep
