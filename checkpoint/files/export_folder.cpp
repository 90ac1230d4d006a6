#include "lockstep/checkpoint/export_folder.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <tuple>
#include <utility>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/step_folders.h"
#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/datasets/unfinished_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr const char* kUnfinished = ".unfinished.";
constexpr int64_t kLongestCompared = int64_t{64} << 20;

/// Locks a folder until the file is closed; -1 if another process has the lock, or if it fails.
int lock_temporary(const fs::path& folder) {
  const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (file < 0 || ::flock(file, LOCK_EX | LOCK_NB) == 0) return file;
  ::close(file);
  return -1;
}

/// Whether one folder can be renamed into the other. It may be mounted from elsewhere on the same
/// file system.
bool on_one_mount(const fs::path& a, const fs::path& b) {
  const auto place_of = [](const fs::path& path) {
    struct statx found = {};
    const bool is_there = ::statx(AT_FDCWD, path.c_str(), 0, STATX_MNT_ID, &found) == 0;
    return std::tuple(is_there, found.stx_dev_major, found.stx_dev_minor, found.stx_mnt_id);
  };
  const auto of_a = place_of(a);
  return std::get<0>(of_a) && of_a == place_of(b);
}

bool same_content(const fs::path& a, const fs::path& b) {
  try {
    return read_file(a, kLongestCompared) == read_file(b, kLongestCompared);
  } catch (const FileError&) {
    return false;
  }
}

}  // namespace

ExportFolder::ExportFolder(const std::string& folder, std::vector<std::string> names,
                           const std::string& given_as, IsEarlier is_earlier)
    : names_(std::move(names)), is_earlier_(std::move(is_earlier)) {
  try {
    folder_ = fs::weakly_canonical(fs::absolute(folder));
    if (!folder_.has_filename()) folder_ = folder_.parent_path();
    fs::create_directories(folder_.parent_path());
    require<FileError>(!fs::exists(folder_) || fs::is_directory(folder_), "found no folder");
    const bool beside = !fs::exists(folder_) || may_be_replaced();
    make_temporary(beside ? folder_.string() + kUnfinished : (folder_ / kUnfinished).string());
  } catch (const fs::filesystem_error& error) {
    fail<FileError>("{}: folder '{}' cannot be created: {}", given_as, folder,
                    error.code().message());
  } catch (const FileError& error) {
    fail<FileError>("{}: folder '{}' cannot be created: {}", given_as, folder, error.what());
  }
}

ExportFolder::~ExportFolder() {
  std::error_code ignored;
  fs::remove_all(temporary_, ignored);
  if (lock_ >= 0) ::close(lock_);
}

bool ExportFolder::is_of_export(const std::string& name) const {
  return std::find(names_.begin(), names_.end(), name) != names_.end() ||
         (is_earlier_ && is_earlier_(name));
}

bool ExportFolder::may_be_replaced() const {
  const fs::path parent = folder_.parent_path();
  if (!on_one_mount(folder_, parent) || ::access(parent.c_str(), R_OK | W_OK | X_OK) != 0)
    return false;
  const auto entries = names_in_folder(folder_);
  return std::all_of(entries.begin(), entries.end(), [&](const std::string& name) {
    return is_of_export(name) && fs::is_regular_file(fs::symlink_status(folder_ / name));
  });
}

void ExportFolder::remove_abandoned(const std::string& prefix) {
  const fs::path around = fs::path(prefix).parent_path();
  const std::string begin = fs::path(prefix).filename();
  for (const std::string& name : names_in_folder(around)) {
    if (!name.starts_with(begin)) continue;
    const int lock = lock_temporary(around / name);
    if (lock < 0) continue;
    left_.push_back(remove_tree(around / name));
    ::close(lock);
  }
}

void ExportFolder::make_temporary(const std::string& prefix) {
  remove_abandoned(prefix);
  temporary_ = fmt::format("{}{}.{:08x}", prefix, ::getpid(), std::random_device()());
  fs::create_directory(temporary_);
  lock_ = lock_temporary(temporary_);
}

std::vector<std::string> ExportFolder::earlier_files() const {
  std::vector<std::string> earlier;
  for (const std::string& name : names_in_folder(folder_))
    if (is_of_export(name) && std::find(names_.begin(), names_.end(), name) == names_.end())
      earlier.push_back(name);
  return earlier;
}

void ExportFolder::move_files() const {
  const auto is_new = [this](const std::string& name) {
    return !same_content(temporary_ / name, folder_ / name);
  };
  const std::string& last = names_.back();
  const std::vector<std::string> earlier = earlier_files();
  if (is_new(last) || !earlier.empty() || std::count_if(names_.begin(), names_.end(), is_new) > 1)
    fs::remove(folder_ / last);
  for (const std::string& name : earlier) fs::remove(folder_ / name);
  for (const std::string& name : names_) fs::rename(temporary_ / name, folder_ / name);
  sync_folder(folder_);
}

std::string ExportFolder::publish() {
  put_in_place();
  left_.push_back(remove_tree(temporary_));
  return join_problems(left_);
}

void ExportFolder::put_in_place() const {
  try {
    sync_folder(temporary_);
    if (temporary_.parent_path() == folder_) return move_files();
    if (!fs::exists(folder_)) {
      fs::rename(temporary_, folder_);
    } else if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, folder_.c_str(),
                           RENAME_EXCHANGE) != 0) {
      require<FileError>(lacks_exchange(errno), "'{}' cannot be renamed to '{}': {}",
                         temporary_.string(), folder_.string(), std::strerror(errno));
      return move_files();
    }
    sync_folder(folder_.parent_path());
  } catch (const fs::filesystem_error& error) {
    fail<FileError>("'{}' cannot be written: '{}': {}", folder_.string(), error.path1().string(),
                    error.code().message());
  }
}

}  // namespace lockstep
