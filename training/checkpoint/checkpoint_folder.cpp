#include "lockstep/training/checkpoint/checkpoint_folder.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <optional>
#include <sstream>

#include "lockstep/core/check.h"
#include "lockstep/training/checkpoint/manifest.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLatest = "latest";
constexpr std::string_view kStep = "step_";
constexpr std::string_view kPartial = ".partial";
constexpr int64_t kLongestLatest = int64_t{1} << 20;

/// N of a folder name "step_N".
std::optional<int64_t> step_number(const std::string& name) {
  int64_t number = 0;
  if (!name.starts_with(kStep)) return {};
  const char* const end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + kStep.size(), end, number);
  if (error != std::errc() || rest != end || number < 0) return {};
  return number;
}

bool is_partial_step(const std::string& name) {
  return name.starts_with(kStep) && name.ends_with(kPartial);
}

bool is_folder(const std::string& path) {
  try {
    return kind_of_file(path) == FileKind::folder;
  } catch (const FileError& error) {
    fail<FileError>("checkpoint: folder {}", error.what());
  }
}

std::vector<std::string> listed_steps(const fs::path& folder) {
  const fs::path latest = folder / kLatest;
  const FileKind kind = kind_of_file(latest, /*follow_links=*/false);
  if (kind == FileKind::none) return {};
  require<FileError>(kind == FileKind::regular,
                     "'{}': found no regular file, allowed: the list of steps that a run writes, "
                     "or nothing (then the highest step is the newest)",
                     latest.string());
  std::istringstream text(read_file(latest, kLongestLatest));
  std::vector<std::string> names;
  for (std::string name; text >> name;)
    if (step_number(name)) names.push_back(name);
  return names;
}

void sync_folder(const fs::path& folder) {
  const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool good = file >= 0 && ::fsync(file) == 0;
  const int error = errno;
  if (file >= 0) ::close(file);
  // Some file systems cannot synchronize folders; there the rename is as durable as it gets.
  require<FileError>(good || error == EINVAL, "'{}' cannot be synchronized: {}", folder.string(),
                     std::strerror(error));
}

/// Renames `from` to `to`, in one step; what was at `to` is then at `from`.
void put_in_place(const fs::path& from, const fs::path& to) {
  if (!fs::exists(to)) return fs::rename(from, to);
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) return;
  const fs::path old = to.string() + ".old.partial";
  fs::remove_all(old);
  fs::rename(to, old);
  fs::rename(from, to);
  fs::rename(old, from);
}

[[noreturn]] void fail_to_write(const std::string& path, const std::string& reason) {
  fail<FileError>("checkpoint '{}' cannot be written: {}", path, reason);
}

}  // namespace

bool is_checkpoint(const std::string& folder) {
  return kind_of_file(folder + "/" + kManifestName, /*follow_links=*/false) == FileKind::regular;
}

std::string step_name(int64_t iteration) { return fmt::format("{}{}", kStep, iteration); }

std::vector<std::string> complete_checkpoints(const std::string& folder) {
  std::vector<std::string> names;
  if (!is_folder(folder)) return names;
  for (const std::string& name : listed_steps(folder))
    if (is_checkpoint(folder + "/" + name) &&
        std::find(names.begin(), names.end(), name) == names.end())
      names.push_back(name);
  std::vector<std::pair<int64_t, std::string>> others;
  for (const std::string& name : names_in_folder(folder)) {
    const auto number = step_number(name);
    if (number && is_checkpoint(folder + "/" + name) &&
        std::find(names.begin(), names.end(), name) == names.end())
      others.emplace_back(*number, name);
  }
  std::sort(others.rbegin(), others.rend());
  for (const auto& [number, name] : others) names.push_back(name);
  for (std::string& name : names) name = (fs::path(folder) / name).string();
  return names;
}

std::string find_checkpoint(const std::string& folder) {
  require<FileError>(is_folder(folder), "checkpoint: '{}' is no folder", folder);
  if (is_checkpoint(folder)) return folder;
  const auto found = complete_checkpoints(folder);
  require<FileError>(!found.empty(), "checkpoint: '{}' holds no complete step_N/ with a {}", folder,
                     kManifestName);
  return found.front();
}

bool has_checkpoint(const std::string& folder) {
  return is_folder(folder) && (is_checkpoint(folder) || !complete_checkpoints(folder).empty());
}

PartialCheckpoint::PartialCheckpoint(std::string folder, int64_t iteration)
    : folder_(std::move(folder)),
      name_(step_name(iteration)),
      final_((fs::path(folder_) / name_).string()),
      partial_(final_ + std::string(kPartial)) {}

void PartialCheckpoint::begin() const {
  try {
    fs::create_directories(folder_);
    for (const auto& entry : fs::directory_iterator(folder_))
      if (is_partial_step(entry.path().filename())) fs::remove_all(entry.path());
    fs::create_directory(partial_);
  } catch (const fs::filesystem_error& error) {
    fail_to_write(partial_, error.code().message());
  }
}

void PartialCheckpoint::commit(std::string_view manifest, int64_t keep) const {
  const fs::path folder = folder_;
  try {
    write_file(file(kManifestName), {manifest});
    sync_folder(partial_);
    auto names = complete_checkpoints(folder_);
    std::string latest = name_ + "\n";
    for (const std::string& path : names)
      if (path != final_) latest += fs::path(path).filename().string() + "\n";
    write_file(folder / (std::string(kLatest) + ".partial"), {latest});
    put_in_place(partial_, final_);
    sync_folder(folder);
    fs::rename(folder / (std::string(kLatest) + ".partial"), folder / kLatest);
    sync_folder(folder);
    sync_folder(fs::absolute(folder).parent_path());
    fs::remove_all(partial_);
    names = complete_checkpoints(folder_);
    for (size_t i = static_cast<size_t>(keep); keep > 0 && i < names.size(); ++i) {
      // A checkpoint that loses its manifest first is never taken for a complete one. That of a
      // folder elsewhere is not this run's to remove.
      if (!fs::is_symlink(names[i])) fs::remove(fs::path(names[i]) / kManifestName);
      fs::remove_all(names[i]);
    }
  } catch (const fs::filesystem_error& error) {
    fail_to_write(final_, error.code().message());
  }
}

void PartialCheckpoint::discard() const noexcept {
  std::error_code error;
  fs::remove_all(partial_, error);
}

FileWriter::FileWriter(std::string path) : path_(std::move(path)) {
  file_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file_ < 0) fail_to_write();
}

FileWriter::~FileWriter() {
  if (file_ >= 0) ::close(file_);
}

void FileWriter::write(std::string_view bytes) {
  constexpr int64_t kStretch = int64_t{32} << 20;
  while (!bytes.empty()) {
    const ssize_t count = ::write(file_, bytes.data(), bytes.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) fail_to_write();
    bytes.remove_prefix(static_cast<size_t>(count));
    written_ += count;
  }
  if (written_ - begun_ < kStretch) return;
  ::sync_file_range(file_, begun_, written_ - begun_, SYNC_FILE_RANGE_WRITE);
  begun_ = written_;
}

void FileWriter::finish() {
  if (::fsync(file_) != 0) fail_to_write();
  ::close(file_);
  file_ = -1;
}

void FileWriter::fail_to_write() const {
  fail<FileError>("'{}' cannot be written: {}", path_, std::strerror(errno));
}

void write_file(const std::string& path, const std::vector<std::string_view>& pieces) {
  FileWriter file(path);
  for (const std::string_view piece : pieces) file.write(piece);
  file.finish();
}

}  // namespace lockstep
