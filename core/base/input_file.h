#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

/// Reading files: everything here is read in this one way. A call that fails is never taken for the
/// end of a file, nor for a missing file: it is a FileError with the path, the byte and the
/// system's reason. So is an end before the size that the file had when it was opened. Interrupted
/// and short reads are continued. The result of close() is ignored: it comes after the last byte
/// was read, and nothing was written. Needs no libtorch.
namespace lockstep {

enum class FileKind { none, regular, folder, other };

/// The kind of what is at `path`; `none` only if the system says that nothing is there. FileError
/// otherwise.
FileKind kind_of_file(const std::string& path, bool follow_links = true);

/// The size in bytes of a regular file; 0 for anything else, such as a pipe. FileError if there is
/// nothing.
int64_t size_of_file(const std::string& path);

/// The names in a folder, in no particular order, without "." and "..". FileError.
std::vector<std::string> names_in_folder(const std::string& path);

enum class InputKinds {
  regular,
  regular_or_pipe,  ///< opening a pipe waits for its writer
  any               ///< for what is read up to a limit: a device need not end
};

struct InputOptions {
  InputKinds kinds = InputKinds::regular;
  bool follow_links = true;
};

/// A file that is open for reading.
class InputFile {
 public:
  /// FileError if it is missing, cannot be opened, or is of another kind.
  explicit InputFile(std::string path, const InputOptions& options = {});
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const { return path_; }
  /// Bytes that it had when it was opened; 0 unless it is regular.
  int64_t size() const { return size_; }
  int descriptor() const { return file_; }

  /// Reads the next `count` bytes; fewer only at the end. Returns how many were read.
  size_t read(char* to, size_t count);

  /// Reads the `count` bytes from `offset` on, all of them. For regular files; several threads may
  /// call it.
  void read_at(int64_t offset, char* to, size_t count) const;

 private:
  std::string path_;
  int file_ = -1;
  int64_t size_ = 0;
  int64_t position_ = 0;
};

/// The rest of a file, at most `limit` bytes. FileError also if it exceeds that or the memory.
std::string read_all(InputFile& file, int64_t limit = std::numeric_limits<int64_t>::max());

/// The content of a regular file or a pipe, to its end; symbolic links are followed. FileError.
std::string read_to_end(const std::string& path);

/// The content of a regular file of at most `limit` bytes; a symbolic link is not followed unless
/// `follow_links`. FileError names the path.
std::string read_file(const std::string& path, int64_t limit, bool follow_links = false);

}  // namespace lockstep
