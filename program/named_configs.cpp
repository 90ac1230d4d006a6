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
FileKind kind_of_config(const std::string& path) {
  try {
    return kind_of_file(path);
  } catch (const FileError& error) {
    fail<ConfigError>("CONFIG: {}", error.what());
  }
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
  if (kind_of_file(folder) == FileKind::none) return configs;
  for (const std::string& file : names_in_folder(folder)) {
    if (!file.ends_with(kSuffix)) continue;
    const std::string path = folder / file;
    configs.push_back({file.substr(0, file.size() - kSuffix.size()), path,
                       first_sentence(read_file(path, kMaxBytes, /*follow_links=*/true))});
  }
  std::sort(configs.begin(), configs.end(),
            [](const NamedConfig& a, const NamedConfig& b) { return a.name < b.name; });
  return configs;
}

NamedConfig named_config(const std::string& name) {
  const auto configs = named_configs();
  const NamedConfig* const found = find(configs, name);
  require<ConfigError>(found != nullptr, "found '{}', allowed: {}", name, names_of(configs));
  return *found;
}

std::string config_file(const std::string& given) {
  const FileKind kind = kind_of_config(given);
  const bool missing = kind == FileKind::none;
  if (!missing && kind != FileKind::folder) return given;
  const auto configs = named_configs();
  if (const NamedConfig* const found = find(configs, given)) return found->path;
  require<ConfigError>(!missing,
                       "CONFIG: '{}' cannot be read as a configuration: No such file or directory, "
                       "nor is it the name of one that comes with lockstep: {}",
                       given, names_of(configs));
  return given;
}

}  // namespace lockstep
