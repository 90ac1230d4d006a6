#pragma once

// Internal.

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace lockstep {

/// Some files that appear together in a folder, at the end or not at all. They are written into a
/// temporary folder, which then becomes the folder: where there is none yet, and, by an exchange in
/// one step, where it holds nothing but files of earlier exports. A folder that holds others too
/// (or is a mount point, or of a file system without such exchanges) keeps them: the files are
/// moved into it one by one, and what an earlier export has more is removed. The last of the names
/// goes first and comes last, so that it never stands beside files of another export, unless it is
/// the same as before and at most one of the others is not.
class ExportFolder {
 public:
  /// Says of a file's name whether it can only be that of an earlier export.
  using IsEarlier = std::function<bool(const std::string&)>;

  /// Makes the temporary folder, and removes those of exports that were killed. FileError, with
  /// `given_as` and the path: it cannot be made.
  ExportFolder(const std::string& folder, std::vector<std::string> names,
               const std::string& given_as, IsEarlier is_earlier = {});
  /// Removes the temporary folder.
  ~ExportFolder();
  ExportFolder(const ExportFolder&) = delete;
  ExportFolder& operator=(const ExportFolder&) = delete;

  /// Where to write a file.
  std::string file(const std::string& name) const { return temporary_ / name; }

  /// All files are written, and on disk. FileError names the path; what was in the folder before is
  /// there still, apart from the last name where files are moved one by one. Returns what cannot be
  /// removed of this and of killed exports, and why; empty if there is nothing.
  std::string publish();

 private:
  bool is_of_export(const std::string& name) const;
  bool holds_these_alone() const;
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
