#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

/// Reading files, the one way in which everything here is read. A call that fails is never taken
/// for the end of a file, nor for a file that is not there: it is a FileError with the path, the
/// byte and the system's reason. So is an end before the size that the file had when it was opened.
/// Interrupted and short reads go on. What close() says is not looked at: it comes after the last
/// byte was had, and nothing was written. Needs no libtorch.
namespace lockstep {

enum class FileKind { none, regular, folder, other };

/// What is at `path`; `none` only where the system says that nothing is. FileError otherwise.
FileKind kind_of_file(const std::string& path, bool follow_links = true);

/// The bytes of a regular file; 0 of anything else, such as a pipe. FileError where there is none.
int64_t size_of_file(const std::string& path);

/// The names in a folder, in no order, without "." and "..". FileError.
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

  /// The next `count` bytes; fewer only at the end. How many came.
  size_t read(char* to, size_t count);

  /// The `count` bytes from `offset` on, all of them. Of regular files; several threads may.
  void read_at(int64_t offset, char* to, size_t count) const;

 private:
  std::string path_;
  int file_ = -1;
  int64_t size_ = 0;
  int64_t position_ = 0;
};

/// What is left of a file, at most `limit` bytes. FileError also where it exceeds that or the
/// memory.
std::string read_all(InputFile& file, int64_t limit = std::numeric_limits<int64_t>::max());

/// The content of a regular file or a pipe, to its end; symbolic links are followed. FileError.
std::string read_to_end(const std::string& path);

/// The content of a regular file of at most `limit` bytes; a symbolic link is not followed unless
/// `follow_links`. FileError names the path.
std::string read_file(const std::string& path, int64_t limit, bool follow_links = false);

}  // namespace lockstep
