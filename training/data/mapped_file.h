#pragma once

#include <string>
#include <string_view>

namespace lockstep {

/// The bytes of a regular file, mapped into memory: only the parts that are read take memory. Needs
/// no libtorch. Nobody may shorten the file meanwhile: reading what is gone ends the process
/// (SIGBUS).
class MappedFile {
 public:
  /// FileError with the path if the file is missing, cannot be read or is no regular file. An empty
  /// one has no bytes.
  explicit MappedFile(std::string path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::string_view bytes() const { return bytes_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::string_view bytes_;
};

}  // namespace lockstep
