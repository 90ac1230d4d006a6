#include "lockstep/program/named_configs.h"

#include <algorithm>
#include <sstream>

#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/program/installation.h"

namespace lockstep {
namespace {

constexpr std::string_view kSuffix = ".textproto";
constexpr int64_t kMaxBytes = 1 << 20;  ///< as parse_config() takes

std::string names_of(const std::vector<NamedConfig>& configs) {
  std::vector<std::string> names;
  for (const NamedConfig& config : configs) names.push_back(config.name);
  return names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "));
}

const NamedConfig* find(const std::vector<NamedConfig>& configs, const std::string& name) {
  const auto found = std::find_if(configs.begin(), configs.end(),
                                  [&](const NamedConfig& config) { return config.name == name; });
  return found == configs.end() ? nullptr : &*found;
}

/// kind_of_file(), with the error of an unusable argument.
FileKind kind_of_argument(const char* argument, const std::string& path) {
  try {
    return kind_of_file(path);
  } catch (const FileError& error) {
    fail<ConfigError>("{}: {}", argument, error.what());
  }
}

/// Names of the *.textproto files of a folder; none without the folder.
std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  if (kind_of_file(folder) == FileKind::none) return names;
  for (const std::string& file : names_in_folder(folder))
    if (file.ends_with(kSuffix)) names.push_back(file.substr(0, file.size() - kSuffix.size()));
  std::sort(names.begin(), names.end());
  return names;
}

std::filesystem::path file_in(const std::filesystem::path& folder, const std::string& name) {
  return folder / (name + std::string(kSuffix));
}

}  // namespace

std::string first_sentence(const std::string& text) {
  std::istringstream lines(text);
  std::string comment;
  for (std::string line; std::getline(lines, line) && line.starts_with('#');) {
    const size_t begin = line.find_first_not_of("# ");
    if (begin == std::string::npos) break;
    comment += (comment.empty() ? "" : " ") + line.substr(begin);
  }
  const size_t end = std::min(comment.find(". "), comment.find_last_not_of(". \r") + 1);
  return comment.substr(0, end);
}

std::vector<NamedConfig> named_configs() {
  const std::filesystem::path folder = installed_path("share/lockstep/configs");
  std::vector<NamedConfig> configs;
  for (const std::string& name : names_in(folder)) {
    const std::string path = file_in(folder, name);
    configs.push_back(
        {name, path, first_sentence(read_file(path, kMaxBytes, /*follow_links=*/true))});
  }
  return configs;
}

NamedConfig named_config(const std::string& name) {
  const auto configs = named_configs();
  const NamedConfig* const found = find(configs, name);
  require<ConfigError>(found != nullptr, "found '{}', allowed: {}", name, names_of(configs));
  return *found;
}

std::string config_file(const std::string& given) {
  const FileKind kind = kind_of_argument("CONFIG", given);
  const bool missing = kind == FileKind::none;
  if (!missing && kind != FileKind::folder) return given;
  const auto configs = named_configs();
  if (const NamedConfig* const found = find(configs, given)) return found->path;
  require<ConfigError>(!missing,
                       "CONFIG: '{}' cannot be read as a configuration: No such file or directory; "
                       "configurations that come with lockstep: {}",
                       given, names_of(configs));
  return given;
}

std::string machine_file(const std::string& given) {
  if (kind_of_argument("--machine", given) != FileKind::none) return given;
  const std::filesystem::path folder = installed_path("share/lockstep/configs/machines");
  const std::vector<std::string> names = names_in(folder);
  require<ConfigError>(std::find(names.begin(), names.end(), given) != names.end(),
                       "--machine: '{}' is neither a file nor one of the machines that come with "
                       "lockstep: {}",
                       given, fmt::join(names, ", "));
  return file_in(folder, given);
}

}  // namespace lockstep
