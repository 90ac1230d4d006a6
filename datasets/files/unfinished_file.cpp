#include "lockstep/datasets/unfinished_file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <utility>
#include <vector>

#include "lockstep/core/check.h"
#include "lockstep/core/uninterrupted.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kUnfinished = ".unfinished.";

/// Whether the constructor makes such an end: a process and eight digits of a random number.
bool is_temporary_end(std::string_view end) {
  const size_t dot = end.find('.');
  const auto all = [](std::string_view text, int (*kind)(int)) {
    return !text.empty() && std::all_of(text.begin(), text.end(),
                                        [&](unsigned char letter) { return kind(letter) != 0; });
  };
  return dot != std::string_view::npos && all(end.substr(0, dot), std::isdigit) &&
         end.size() == dot + 9 && all(end.substr(dot + 1), std::isxdigit);
}

int open_file(const std::string& path, int flags) {
  constexpr int kAlways = O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  return uninterrupted([&] { return ::open(path.c_str(), kAlways | flags, 0666); });
}

bool lock(int file, int how) {
  return uninterrupted([&] { return ::flock(file, how); }) == 0;
}

/// The temporary files of a final name that can be listed.
std::vector<fs::path> temporary_files(const std::string& final_path) {
  const fs::path path(final_path);
  const fs::path folder = path.has_parent_path() ? path.parent_path() : ".";
  const std::string begin = path.filename().string() + std::string(kUnfinished);
  std::vector<fs::path> files;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename();
    if (name.starts_with(begin) && is_temporary_end(name.substr(begin.size())))
      files.push_back(entry->path());
  }
  return files;
}

/// Removes what killed processes left of the file. A process that still writes one has its lock.
void remove_abandoned(const std::string& final_path) {
  for (const fs::path& path : temporary_files(final_path)) {
    const int file = open_file(path, 0);
    if (file < 0) continue;
    if (lock(file, LOCK_EX | LOCK_NB)) ::unlink(path.c_str());
    ::close(file);
  }
}

/// Makes a file and locks it, where the file system has locks. -1, with errno, on failure.
int make_locked(const std::string& path) {
  const int file = open_file(path, O_CREAT | O_EXCL);
  if (file >= 0) lock(file, LOCK_EX);
  return file;
}

bool has_a_name(int file) {
  struct stat status = {};
  return ::fstat(file, &status) != 0 || status.st_nlink > 0;
}

}  // namespace

UnfinishedFile::UnfinishedFile(std::string final_path, std::string_view action)
    : final_path_(std::move(final_path)) {
  remove_abandoned(final_path_);
  for (;;) {
    path_ =
        fmt::format("{}{}{}.{:08x}", final_path_, kUnfinished, ::getpid(), std::random_device()());
    file_ = make_locked(path_);
    if (file_ < 0) fail_with_reason(action);
    if (has_a_name(file_)) return;
    ::close(file_);  // another process took it for abandoned before it was locked
  }
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
  if (end < 0 || uninterrupted([&] { return ::ftruncate(file_, end); }) != 0)
    fail_with_reason("shortened");
}

void UnfinishedFile::sync() {
  if (uninterrupted([this] { return ::fsync(file_); }) != 0) fail_with_reason("written");
  // Closing may report an error; the second descriptor keeps the lock.
  const int kept = ::fcntl(file_, F_DUPFD_CLOEXEC, 0);
  if (kept < 0) fail_with_reason("written");
  if (::close(std::exchange(file_, kept)) != 0 && errno != EINTR) fail_with_reason("written");
}

void UnfinishedFile::publish() {
  if (std::rename(path_.c_str(), final_path_.c_str()) != 0) fail_with_reason("renamed");
  path_.clear();
  ::close(std::exchange(file_, -1));  // until now the lock kept it from being taken for abandoned
}

bool is_being_written(const std::string& final_path) {
  const auto a_minute_ago = fs::file_time_type::clock::now() - std::chrono::minutes(1);
  const std::vector<fs::path> files = temporary_files(final_path);
  return std::any_of(files.begin(), files.end(), [&](const fs::path& path) {
    std::error_code error;
    const fs::file_time_type written = fs::last_write_time(path, error);
    return !error && written > a_minute_ago;
  });
}

std::string behind_links(const std::string& path) {
  constexpr int kMostLinks = 40;  // as the kernel follows; a loop stays a link, which is an error
  std::filesystem::path file = path;
  std::error_code error;
  // Links of /proc, such as that of /dev/stdout, name no file where they lead to a pipe.
  if (std::filesystem::is_regular_file(file, error)) {
    const std::filesystem::path real = std::filesystem::canonical(file, error);
    return error ? path : real.string();
  }
  if (std::filesystem::exists(file, error)) return path;
  for (int i = 0; i < kMostLinks && std::filesystem::is_symlink(file, error); ++i) {
    const std::filesystem::path target = std::filesystem::read_symlink(file, error);
    if (error) break;
    file = file.parent_path() / target;  // an absolute target replaces all of it
  }
  return file;
}

namespace {

std::filesystem::path output_target(const std::string& path) {
  std::error_code error;
  const std::filesystem::file_status there = std::filesystem::status(path, error);
  require<FileError>(!std::filesystem::exists(there) || std::filesystem::is_regular_file(there),
                     "'{}' cannot be written: found no regular file in its place", path);
  const std::filesystem::path target = behind_links(path);
  require<FileError>(!std::filesystem::is_symlink(target, error), "'{}' cannot be written: {}",
                     path, std::strerror(ELOOP));
  return target;
}

}  // namespace

void check_output_file(const std::string& path) {
  const UnfinishedFile probe(output_target(path), "written");
}

void write_output_file(const std::string& path, std::string_view text) {
  const std::filesystem::path target = output_target(path);
  UnfinishedFile file(target, "written");
  file.write(text);
  file.sync();
  file.publish();
  sync_folder_of(target);
}

void sync_folder(const std::filesystem::path& folder) {
  const int file =
      uninterrupted([&] { return ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); });
  const bool good = file >= 0 && uninterrupted([&] { return ::fsync(file); }) == 0;
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
