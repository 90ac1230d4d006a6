#include "lockstep/checkpoint/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/core/uninterrupted.h"

namespace lockstep {
namespace {

constexpr int64_t kLongestHolder = 1000;
constexpr int kMostTries = 100;

std::string this_process() {
  std::array<char, 256> host = {};
  ::gethostname(host.data(), host.size() - 1);
  return fmt::format("host {}, process {}", host.data(), ::getpid());
}

bool is_same_file(const struct stat& one, const struct stat& other) {
  return one.st_dev == other.st_dev && one.st_ino == other.st_ino;
}

}  // namespace

FolderLock::FolderLock(const std::string& folder, const std::string& given_as)
    : path_(folder + "/lock"), made_(folder) {
  make_folder(folder, given_as);
  require<FileError>(!is_checkpoint(folder),
                     "{}: folder '{}' is a checkpoint itself, allowed: the folder around it",
                     given_as, folder);
  for (int tries = 0;; ++tries) {
    do file_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644);
    while (file_ < 0 && errno == EINTR);
    if (file_ < 0 && errno == ENOENT && tries < kMostTries) {  // the last run has removed it
      make_folder(folder, given_as);
      continue;
    }
    require<FileError>(file_ >= 0, "{}: '{}' cannot be written: {}", given_as, path_,
                       std::strerror(errno));
    check_file(given_as);
    if (!try_to_lock()) fail_as_taken(folder, given_as);
    if (is_at_path()) break;
    ::close(file_);  // the last run has removed it on leaving
  }
  const std::string holder = this_process();
  // The text is only for people; a full disk must not stop the run.
  if (::ftruncate(file_, 0) != 0 || ::pwrite(file_, holder.data(), holder.size(), 0) < 0) return;
}

/// If somebody has removed the file meanwhile, the one that is there now is another run's.
FolderLock::~FolderLock() {
  struct stat mine = {}, there = {};
  if (uninterrupted([&] { return ::fstat(file_, &mine); }) == 0 &&
      uninterrupted([&] { return ::lstat(path_.c_str(), &there); }) == 0 &&
      is_same_file(mine, there))
    ::unlink(path_.c_str());
  ::close(file_);
}

FolderLock::MadeFolders::MadeFolders(const std::string& folder) {
  std::error_code ignored;
  std::filesystem::path path = std::filesystem::path(folder).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  for (; !path.empty() && !exists(path, ignored); path = path.parent_path())
    missing_.push_back(path.string());
}

FolderLock::MadeFolders::~MadeFolders() {
  for (const std::string& folder : missing_)
    if (::rmdir(folder.c_str()) != 0) break;  // something is in it
}

void FolderLock::make_folder(const std::string& folder, const std::string& given_as) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  require<FileError>(!error, "{}: folder '{}' cannot be created: {}", given_as, folder,
                     error.message());
}

void FolderLock::check_file(const std::string& given_as) const {
  struct stat status = {};
  int result = 0;
  do result = ::fstat(file_, &status);
  while (result != 0 && errno == EINTR);
  const char* const reason =
      result == 0 ? "found no regular file with one name" : std::strerror(errno);
  if (result == 0 && S_ISREG(status.st_mode) && status.st_nlink <= 1) return;
  ::close(file_);
  fail<FileError>("{}: '{}' cannot be written: {}", given_as, path_, reason);
}

bool FolderLock::try_to_lock() {
  while (::flock(file_, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) return false;
    if (errno == EINTR) continue;
    const bool without_locks = errno == ENOLCK || errno == ENOTSUP || errno == ENOSYS;
    if (!without_locks) fail_to_lock();
    is_locked_ = false;
    return true;
  }
  is_locked_ = true;
  return true;
}

bool FolderLock::is_at_path() const {
  struct stat mine = {}, there = {};
  int result = 0;
  do result = ::fstat(file_, &mine);
  while (result != 0 && errno == EINTR);
  if (result != 0) fail_to_lock();
  do result = ::lstat(path_.c_str(), &there);
  while (result != 0 && errno == EINTR);
  if (result != 0 && errno != ENOENT) fail_to_lock();
  return result == 0 && is_same_file(mine, there);
}

void FolderLock::fail_to_lock() const {
  const int error = errno;
  ::close(file_);
  fail<FileError>("'{}' cannot be locked: {}", path_, std::strerror(error));
}

void FolderLock::fail_as_taken(const std::string& folder, const std::string& given_as) const {
  ::close(file_);
  std::string holder = "another process";
  try {
    const std::string text = read_file(path_, kLongestHolder);
    if (!text.empty()) holder = text;
  } catch (const FileError&) {  // the other run has ended meanwhile
  }
  fail<FileError>("{}: folder '{}' is taken by another run ({}), allowed: one run at a time",
                  given_as, folder, holder);
}

}  // namespace lockstep
