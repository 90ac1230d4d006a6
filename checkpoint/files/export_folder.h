#pragma once

// Internal.

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace lockstep {

/// Several files that appear together in a folder, at the end or not at all. They are written into
/// a temporary folder. If the folder does not exist yet, or holds only files of earlier exports,
/// the temporary folder becomes the folder, in the latter case by an atomic exchange. A folder that
/// also holds other files (or is a mount point, or is on a file system without such exchanges, or
/// in a folder that this process may not read and write) keeps those: the files are moved into it
/// one by one, and additional files of an earlier export are removed. The last of the names is
/// removed first and added last, so that it is never next to files of another export, unless it is
/// unchanged and at most one of the others has changed.
class ExportFolder {
 public:
  /// Whether a file of that name is one of an earlier export.
  using IsEarlier = std::function<bool(const std::string&)>;

  /// Creates the temporary folder, and removes those of exports that were killed. FileError, with
  /// `given_as` and the path, if it cannot be created.
  ExportFolder(const std::string& folder, std::vector<std::string> names,
               const std::string& given_as, IsEarlier is_earlier = {});
  /// Removes the temporary folder.
  ~ExportFolder();
  ExportFolder(const ExportFolder&) = delete;
  ExportFolder& operator=(const ExportFolder&) = delete;

  /// Where to write a file.
  std::string file(const std::string& name) const { return temporary_ / name; }

  /// Call it when all files are written and on disk. FileError names the path; what was in the
  /// folder before is still there, except for the last name if files are moved one by one. Returns
  /// what cannot be removed of this and of killed exports, and why; empty if there is nothing.
  std::string publish();

 private:
  bool is_of_export(const std::string& name) const;
  bool may_be_replaced() const;
  void make_temporary(const std::string& prefix);
  void remove_abandoned(const std::string& prefix);
  void put_in_place() const;
  void move_files() const;
  std::vector<std::string> earlier_files() const;

  std::filesystem::path folder_;
  std::vector<std::string> names_;
  IsEarlier is_earlier_;
  std::filesystem::path temporary_;
  std::vector<std::string> left_;  ///< what cannot be removed
  int lock_ = -1;                  ///< of the temporary folder, while this process lives
};

}  // namespace lockstep
