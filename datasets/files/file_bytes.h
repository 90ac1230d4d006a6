#pragma once

#include <string>
#include <string_view>

namespace lockstep {

/// The bytes of a regular file. Up to 64 MiB are copied into memory. A larger file is mapped, so
/// that all processes of a host share it and only the parts that are read take memory; nobody may
/// shorten it meanwhile: reading what is gone, or what the disk cannot deliver, is a SIGBUS, which
/// the `lockstep` program reports with the file's name (see mapped_files.h). Needs no libtorch.
class FileBytes {
 public:
  /// FileError with the path if the file is missing, cannot be read or is not a regular file. An
  /// empty file has no bytes.
  explicit FileBytes(std::string path);
  ~FileBytes();
  FileBytes(const FileBytes&) = delete;
  FileBytes& operator=(const FileBytes&) = delete;

  std::string_view bytes() const { return bytes_; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::string copy_;
  std::string_view bytes_;
};

}  // namespace lockstep
