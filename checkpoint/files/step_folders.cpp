#include "lockstep/checkpoint/step_folders.h"

#include <fcntl.h>
#include <stdio.h>

#include <cerrno>
#include <charconv>
#include <cstring>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/companion_record.h"
#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/datasets/unfinished_file.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

bool is_leftover(const std::string& name) {
  return name.starts_with(kStep) && name.ends_with(kPartial);
}

bool is_record(const std::string& name) {
  return name.starts_with(kStep) && name.ends_with(kCompanionRecord);
}

/// Gives a folder that was set aside its name back, unless another has taken it.
void restore(const fs::path& folder, const std::string& aside) {
  const std::string name = aside.substr(0, aside.size() - kAside.size());
  if (place_of_step(folder, name) != folder / aside) return;
  fs::rename(folder / aside, folder / name);
  sync_folder(folder);
}

std::string not_removed(const fs::path& path, const std::error_code& error) {
  return fmt::format("'{}' cannot be removed: {}", path.string(), error.message());
}

}  // namespace

bool lacks_exchange(int error) {
  return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP || error == EPERM;
}

std::optional<int64_t> step_number(std::string_view name) {
  int64_t number = 0;
  if (!name.starts_with(kStep)) return {};
  const char* const end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + kStep.size(), end, number);
  if (error != std::errc() || rest != end || number < 0) return {};
  return number;
}

std::optional<fs::path> place_of_step(const fs::path& folder, const std::string& name) {
  if (is_checkpoint(folder / name)) return folder / name;
  const fs::path aside = folder / (name + std::string(kAside));
  if (step_number(name) && is_checkpoint(aside)) return aside;
  return {};
}

void put_in_place(const fs::path& from, const fs::path& to) {
  if (!fs::exists(to)) return fs::rename(from, to);
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) return;
  require<FileError>(lacks_exchange(errno), "'{}' cannot be renamed to '{}': {}", from.string(),
                     to.string(), std::strerror(errno));
  const fs::path aside = to.string() + std::string(kAside);
  fs::remove_all(aside);
  fs::rename(to, aside);
  try {
    fs::rename(from, to);
  } catch (const fs::filesystem_error&) {
    std::error_code ignored;  // if it stays aside, it is found there
    fs::rename(aside, to, ignored);
    throw;
  }
}

std::string remove_tree(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  return error ? not_removed(path, error) : "";
}

std::string join_problems(std::vector<std::string> problems) {
  std::erase(problems, "");
  return fmt::format("{}", fmt::join(problems, "; "));
}

std::string clean_up_steps(const fs::path& folder) {
  for (const std::string& name : names_in_folder(folder))
    if (is_leftover(name) && name.ends_with(kAside)) restore(folder, name);
  std::vector<std::string> problems;
  for (const std::string& name : names_in_folder(folder))
    if (is_record(name)) problems.push_back(settle_companion_record(folder / name));
  for (const std::string& name : names_in_folder(folder))
    if (is_leftover(name) && !is_record(name)) problems.push_back(remove_tree(folder / name));
  return join_problems(std::move(problems));
}

std::string remove_steps(const fs::path& folder, const std::vector<std::string>& paths) {
  std::vector<std::string> problems, renamed;
  for (const std::string& path : paths) {
    const std::string removed = path + std::string(kRemoved);
    std::error_code error;
    fs::rename(path, removed, error);
    if (error)
      problems.push_back(not_removed(path, error));
    else
      renamed.push_back(removed);
  }
  if (!renamed.empty()) sync_folder(folder);
  for (const std::string& path : renamed) problems.push_back(remove_tree(path));
  return join_problems(std::move(problems));
}

}  // namespace lockstep
