#include "lockstep/checkpoint/checkpoint_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <sstream>
#include <utility>

#include "lockstep/checkpoint/manifest.h"
#include "lockstep/checkpoint/step_folders.h"
#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/core/uninterrupted.h"
#include "lockstep/datasets/unfinished_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr const char* kLatest = "latest";
constexpr int64_t kLongestLatest = int64_t{1} << 20;

bool is_folder(const std::string& path) {
  try {
    return kind_of_file(path) == FileKind::folder;
  } catch (const FileError& error) {
    fail<FileError>("checkpoint: folder {}", error.what());
  }
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

/// The words in `latest`, whether or not they name steps.
std::vector<std::string> words_of_latest(const fs::path& folder) {
  const fs::path latest = folder / kLatest;
  const FileKind kind = kind_of_file(latest, /*follow_links=*/false);
  if (kind == FileKind::none) return {};
  require<FileError>(kind == FileKind::regular,
                     "'{}': found no regular file, allowed: the list of steps that a run writes, "
                     "or nothing (then the highest step is the newest)",
                     latest.string());
  return words_of(read_file(latest, kLongestLatest));
}

std::vector<std::string> steps_among(std::vector<std::string> names) {
  std::erase_if(names, [](const std::string& name) { return !step_number(name); });
  return names;
}

fs::path next_latest(const fs::path& folder) { return folder / (kLatest + std::string(kPartial)); }

/// The list with which a save was interrupted between completing its checkpoint and replacing
/// `latest`. Empty if there is none that can be read.
std::vector<std::string> steps_left_unlisted(const fs::path& folder,
                                             const std::vector<std::string>& listed) try {
  const fs::path path = next_latest(folder);
  if (kind_of_file(path, /*follow_links=*/false) != FileKind::regular) return {};
  const std::string text = read_file(path, kLongestLatest);
  std::vector<std::string> steps = steps_among(words_of(text));
  const bool replaces = !steps.empty() && text.ends_with('\n') &&
                        std::find(listed.begin(), listed.end(), steps.front()) == listed.end() &&
                        place_of_step(folder, steps.front());
  return replaces ? steps : std::vector<std::string>();
} catch (const FileError&) {
  return {};
}

/// The checkpoint may be one that was set aside.
int64_t iteration_of(const std::string& path) {
  std::string name = fs::path(path).filename();
  if (name.ends_with(kAside)) name.resize(name.size() - kAside.size());
  return step_number(name).value_or(0);
}

[[noreturn]] void fail_to_write(const std::string& path, const fs::filesystem_error& error) {
  const fs::path& at = error.path1();
  fail<FileError>("checkpoint '{}' cannot be written: {}{}", path,
                  at.empty() || at == path ? "" : fmt::format("'{}': ", at.string()),
                  error.code().message());
}

/// First removes a file or link that is in the way. Returns -1, with errno, on failure.
int make_file(const std::string& path) {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
  const auto make = [&] {
    return uninterrupted([&] { return ::open(path.c_str(), kFlags, 0644); });
  };
  const int file = make();
  if (file >= 0 || errno != EEXIST) return file;
  std::error_code ignored;
  const fs::file_status there = fs::symlink_status(path, ignored);
  require<FileError>(fs::is_regular_file(there) || fs::is_symlink(there),
                     "'{}' cannot be written: found no regular file in its place", path);
  return ::unlink(path.c_str()) == 0 ? make() : -1;
}

void check_replaceable(const std::string& path) {
  require<FileError>(
      kind_of_file(path, /*follow_links=*/false) == FileKind::none || is_checkpoint(path),
      "checkpoint '{}': found something without a {} in its place, allowed: a complete checkpoint, "
      "which the save replaces, or nothing; give it another name, or remove it",
      path, kManifestName);
}

std::vector<std::string> sorted_names(const std::string& folder) {
  std::vector<std::string> names = names_in_folder(folder);
  std::sort(names.begin(), names.end());
  return names;
}

/// The complete checkpoints among the steps in the list `names` and in the folder's `entries`.
std::vector<std::string> complete_among(const std::string& folder, std::vector<std::string> names,
                                        const std::vector<std::string>& entries) {
  std::vector<std::pair<int64_t, std::string>> others;
  for (std::string name : entries) {
    if (name.ends_with(kAside)) name.resize(name.size() - kAside.size());
    if (const auto number = step_number(name)) others.emplace_back(*number, name);
  }
  std::sort(others.rbegin(), others.rend());
  for (const auto& [number, name] : others) names.push_back(name);
  std::vector<std::string> paths;
  std::set<std::string> seen;
  for (const std::string& name : names) {
    if (!seen.insert(name).second) continue;
    if (const auto place = place_of_step(folder, name)) paths.push_back(place->string());
  }
  return paths;
}

}  // namespace

bool is_checkpoint(const std::string& folder) {
  return kind_of_file(folder + "/" + kManifestName, /*follow_links=*/false) == FileKind::regular;
}

std::string step_name(int64_t iteration) { return fmt::format("{}{}", kStep, iteration); }

std::vector<std::string> complete_checkpoints(const std::string& folder) {
  if (!is_folder(folder)) return {};
  for (std::vector<std::string> entries = sorted_names(folder);;) {
    std::vector<std::string> found =
        complete_among(folder, steps_among(words_of_latest(folder)), entries);
    if (!found.empty()) return found;
    // A run may have removed all of these after it saved others.
    std::vector<std::string> now = sorted_names(folder);
    if (now == entries) return {};
    entries = std::move(now);
  }
}

std::string find_checkpoint(const std::string& folder) {
  require<FileError>(is_folder(folder), "checkpoint: '{}' is not a folder", folder);
  if (is_checkpoint(folder)) return folder;
  const auto found = complete_checkpoints(folder);
  require<FileError>(!found.empty(), "checkpoint: '{}' holds no complete step_N/ with a {}", folder,
                     kManifestName);
  return found.front();
}

std::string doubt_about_newest(const std::string& folder) {
  if (!is_folder(folder) || is_checkpoint(folder)) return "";
  const std::vector<std::string> words = words_of_latest(folder);
  if (words.empty() || (step_number(words.front()) && place_of_step(folder, words.front())))
    return "";
  const auto found = complete_checkpoints(folder);
  for (const std::string& path : found) {
    const std::string name = step_name(iteration_of(path));
    if (iteration_of(path) <= iteration_of(found.front()) ||
        std::find(words.begin(), words.end(), name) != words.end())
      continue;
    return fmt::format(
        "'{}/latest' begins with '{}', which is not there, so {} counts as the newest; {} is "
        "complete too, but not listed. If the file is damaged, remove it: then the highest step "
        "counts",
        folder, words.front(), step_name(iteration_of(found.front())), name);
  }
  return "";
}

bool has_checkpoint(const std::string& folder) {
  return is_folder(folder) && (is_checkpoint(folder) || !complete_checkpoints(folder).empty());
}

std::string newest_until(const std::vector<std::string>& checkpoints, int64_t iteration) {
  const auto found =
      std::find_if(checkpoints.begin(), checkpoints.end(),
                   [&](const std::string& path) { return iteration_of(path) <= iteration; });
  return found == checkpoints.end() ? "" : *found;
}

std::string remove_leftovers(const std::string& folder) {
  try {
    return clean_up_steps(folder);
  } catch (const fs::filesystem_error& error) {
    fail<FileError>("'{}' cannot be cleaned up: {}", folder, error.code().message());
  }
}

PartialCheckpoint::PartialCheckpoint(std::string folder, int64_t iteration)
    : folder_(std::move(folder)),
      iteration_(iteration),
      name_(step_name(iteration)),
      final_((fs::path(folder_) / name_).string()),
      partial_(final_ + std::string(kPartial)) {}

std::string PartialCheckpoint::begin() const {
  try {
    check_replaceable(final_);
    fs::create_directories(folder_);
    const std::string problems = clean_up_steps(folder_);
    fs::remove_all(partial_);
    require<FileError>(fs::create_directory(partial_), "checkpoint '{}' already exists", partial_);
    return problems;
  } catch (const fs::filesystem_error& error) {
    fail_to_write(partial_, error);
  }
}

void PartialCheckpoint::complete(std::string_view manifest) const {
  const fs::path folder = folder_, latest = folder / kLatest;
  const fs::path next = next_latest(folder);
  write_file(file(kManifestName), {manifest});
  sync_folder(partial_);
  std::vector<std::string> listed = steps_among(words_of_latest(folder));
  if (auto steps = steps_left_unlisted(folder, listed); !steps.empty()) listed = std::move(steps);
  std::string names = name_ + "\n";
  for (const std::string& path : complete_among(folder_, listed, sorted_names(folder_)))
    if (path != final_) names += fs::path(path).filename().string() + "\n";
  write_file(next, {names});
  put_in_place(partial_, final_);
  sync_folder(folder);
  fs::rename(next, latest);
  sync_folder(folder);
  sync_folder(fs::absolute(folder).parent_path());
}

std::string PartialCheckpoint::commit(std::string_view manifest, const KeptSteps& kept) const {
  try {
    complete(manifest);
  } catch (const fs::filesystem_error& error) {
    fail_to_write(final_, error);
  }
  if (kept.saved) kept.saved->insert(iteration_);
  std::vector<std::string> problems = {remove_tree(partial_),
                                       remove_tree(final_ + std::string(kAside))};
  try {
    problems.push_back(remove_old(kept));
  } catch (const std::exception& error) {
    problems.push_back(
        fmt::format("older checkpoints in '{}' are kept: {}", folder_, error.what()));
  }
  return join_problems(std::move(problems));
}

std::string PartialCheckpoint::remove_old(const KeptSteps& kept) const {
  const auto checkpoints = complete_checkpoints(folder_);
  std::vector<std::string> of_run;
  std::string origin;
  for (const std::string& path : checkpoints) {
    const int64_t step = iteration_of(path);
    if (!kept.saved || kept.saved->contains(step))
      of_run.push_back(path);
    else if (step == kept.origin)
      origin = path;
  }
  const int64_t last_good = iteration_ - kept.skipped_steps;
  std::set<std::string> stay;
  for (const int64_t good : {last_good, kept.unproven ? last_good - 1 : last_good}) {
    const std::string known = newest_until(of_run, good);
    stay.insert(known.empty() ? origin : known);
  }
  std::vector<std::string> old;
  for (size_t i = static_cast<size_t>(kept.keep); kept.keep > 0 && i < checkpoints.size(); ++i)
    if (!stay.contains(checkpoints[i])) old.push_back(checkpoints[i]);
  return remove_steps(folder_, old);
}

void PartialCheckpoint::discard() const noexcept {
  std::error_code error;
  fs::remove_all(partial_, error);
}

FileWriter::FileWriter(std::string path) : path_(std::move(path)), file_(make_file(path_)) {
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
  if (uninterrupted([this] { return ::fsync(file_); }) != 0) fail_to_write();
  if (::close(std::exchange(file_, -1)) != 0 && errno != EINTR) fail_to_write();
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
