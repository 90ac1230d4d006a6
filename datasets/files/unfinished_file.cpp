#include "lockstep/datasets/unfinished_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {

UnfinishedFile::UnfinishedFile(std::string final_path, std::string_view action)
    : final_path_(std::move(final_path)),
      path_(
          fmt::format("{}.unfinished.{}.{:08x}", final_path_, ::getpid(), std::random_device()())),
      file_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) {
  if (file_ < 0) fail_with_reason(action);
}

UnfinishedFile::~UnfinishedFile() {
  if (file_ >= 0) ::close(file_);
  if (!path_.empty()) ::unlink(path_.c_str());
}

void UnfinishedFile::fail_with_reason(std::string_view action) const {
  fail<FileError>("'{}' cannot be {}: {}", final_path_, action, std::strerror(errno));
}

void UnfinishedFile::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(file_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_with_reason("written");
    bytes.remove_prefix(static_cast<size_t>(written));
  }
}

void UnfinishedFile::take_back(int64_t bytes) {
  const off_t end = ::lseek(file_, -static_cast<off_t>(bytes), SEEK_CUR);
  if (end < 0 || ::ftruncate(file_, end) != 0) fail_with_reason("shortened");
}

void UnfinishedFile::sync() {
  if (::fsync(file_) != 0) fail_with_reason("written");
  if (::close(std::exchange(file_, -1)) != 0) fail_with_reason("written");
}

void UnfinishedFile::publish() {
  if (std::rename(path_.c_str(), final_path_.c_str()) != 0) fail_with_reason("renamed");
  path_.clear();
}

void write_output_file(const std::string& path, std::string_view text) {
  std::error_code error;
  const std::filesystem::file_status there = std::filesystem::status(path, error);
  require<FileError>(!std::filesystem::exists(there) || std::filesystem::is_regular_file(there),
                     "'{}' cannot be written: found no regular file in its place", path);
  const bool link = std::filesystem::is_symlink(std::filesystem::symlink_status(path, error));
  const std::filesystem::path target =
      link ? std::filesystem::weakly_canonical(path, error) : std::filesystem::path(path);
  require<FileError>(!link || !error, "'{}' cannot be written: {}", path, error.message());
  UnfinishedFile file(target, "written");
  file.write(text);
  file.sync();
  file.publish();
  sync_folder_of(target);
}

void sync_folder(const std::filesystem::path& folder) {
  const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool good = file >= 0 && ::fsync(file) == 0;
  const int error = errno;
  const bool impossible = file < 0 ? error == EACCES : error == EINVAL;
  if (file >= 0) ::close(file);
  require<FileError>(good || impossible, "'{}' cannot be synchronized: {}", folder.string(),
                     std::strerror(error));
}

void sync_folder_of(const std::string& path) {
  const auto parent = std::filesystem::path(path).parent_path();
  sync_folder(parent.empty() ? "." : parent);
}

}  // namespace lockstep
