#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// Reserves a folder of checkpoints for one process: while it lives, no other process on any host
/// that sees the folder can have it. It is a kernel lock (flock) on the file `lock` in the folder.
/// The lock ends with the process, however that ends, so a killed run does not block others. On
/// file systems without such locks there is no lock; see is_locked(). Needs no libtorch.
class FolderLock {
 public:
  /// Creates the folder if it does not exist. The destructor removes the folders that it created if
  /// they are then empty, as after a run that was refused. FileError names the folder, by
  /// `given_as` (such as the field that sets it), and, if known, host and process of the run that
  /// has it; or what failed; or that the folder is itself a checkpoint, in which others would never
  /// be found.
  explicit FolderLock(const std::string& folder, const std::string& given_as = "checkpoint");
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

  /// Whether the file system has such locks.
  bool is_locked() const { return is_locked_; }

 private:
  /// Removes those folders of a path that did not exist at first and are empty in the end.
  class MadeFolders {
   public:
    explicit MadeFolders(const std::string& folder);
    ~MadeFolders();
    MadeFolders(const MadeFolders&) = delete;
    MadeFolders& operator=(const MadeFolders&) = delete;

   private:
    std::vector<std::string> missing_;  ///< the deepest first
  };

  static void make_folder(const std::string& folder, const std::string& given_as);
  /// Checks that what is written into the lock file cannot reach another file through a hard link.
  void check_file(const std::string& given_as) const;
  /// Returns whether nobody else has locked the file that is now at path_. Sets is_locked_.
  bool try_to_lock();
  bool is_at_path() const;
  [[noreturn]] void fail_to_lock() const;
  [[noreturn]] void fail_as_taken(const std::string& folder, const std::string& given_as) const;

  std::string path_;
  MadeFolders made_;
  int file_ = -1;
  bool is_locked_ = false;
};

}  // namespace lockstep
