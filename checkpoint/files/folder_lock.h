#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// Keeps a folder of checkpoints for one process: while it lives, no other on any host that sees
/// the folder can have it too. It is a lock of the kernel (flock) on the file `lock` of the folder,
/// which goes with the process however that ends, so what a killed run leaves is in nobody's way.
/// File systems without such locks do without. Needs no libtorch.
class FolderLock {
 public:
  /// Makes the folder if it is not there. The folders that it has made go with it if they are empty
  /// then, as after a run that was refused. FileError names the folder, by `given_as` (such as the
  /// field that says it), and, as far as they have told, host and process of the run that has it;
  /// or what failed; or that it is a checkpoint itself, in which others would never be found.
  explicit FolderLock(const std::string& folder, const std::string& given_as = "checkpoint");
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  /// Removes those folders of a path that were not there at first and are empty in the end.
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
  /// What is written into it may not reach another's file, by a second name of that.
  void check_file(const std::string& given_as) const;
  /// Whether it was possible to lock the file that is at path_ now.
  bool try_to_lock();
  bool is_at_path() const;
  [[noreturn]] void fail_to_lock() const;
  [[noreturn]] void fail_as_taken(const std::string& folder, const std::string& given_as) const;

  std::string path_;
  MadeFolders made_;
  int file_ = -1;
};

}  // namespace lockstep
