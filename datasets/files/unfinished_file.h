#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace lockstep {

/// A locked file with a temporary name, in the folder of its final name. Needs no libtorch.
class UnfinishedFile {
 public:
  /// Removes what killed processes left of this file. FileError "'path' cannot be created: why".
  explicit UnfinishedFile(std::string final_path, std::string_view action = "created");
  /// Removes the file unless it was published.
  ~UnfinishedFile();
  UnfinishedFile(const UnfinishedFile&) = delete;
  UnfinishedFile& operator=(const UnfinishedFile&) = delete;

  const std::string& final_path() const { return final_path_; }

  /// Each throws FileError with the path and the system's reason (a full disk).
  void write(std::string_view bytes);
  /// Removes the last `bytes` bytes that were written.
  void take_back(int64_t bytes);
  /// Returns when everything is on disk.
  void sync();
  /// Gives a synced file its final name; a file of that name is replaced.
  void publish();

 private:
  [[noreturn]] void fail_with_reason(std::string_view action) const;

  std::string final_path_;
  std::string path_;
  int file_ = -1;
};

/// Whether an UnfinishedFile of this final name is there into which a process wrote within the last
/// minute.
bool is_being_written(const std::string& final_path);

/// `path`, or what the symbolic links at `path` lead to, also if nothing is there: a file that is
/// renamed to a link's name would replace the link. A loop of links stays one.
std::string behind_links(const std::string& path);

/// Writes a whole file, which appears at the end and replaces an earlier one: the one with the
/// given name, or the one behind_links() of that name. FileError with the path; an existing
/// path that is not a regular file is refused.
void write_output_file(const std::string& path, std::string_view text);

/// Leaves nothing. FileError as for write_output_file(), as far as it is known before the writing:
/// for programs that work for long before they write.
void check_output_file(const std::string& path);

/// Waits until the names in a folder are on disk. Some file systems cannot do that for folders, and
/// some folders may not be opened; in these cases a rename is as durable as it gets. FileError with
/// the path.
void sync_folder(const std::filesystem::path& folder);

/// The same for the folder of a file.
void sync_folder_of(const std::string& path);

}  // namespace lockstep
