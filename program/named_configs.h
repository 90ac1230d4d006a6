#pragma once

#include <string>
#include <vector>

/// The configurations that are installed with the program: the *.textproto files of `configs/` in
/// the source tree, share/lockstep/configs once installed. Nothing here needs libtorch.
namespace lockstep {

struct NamedConfig {
  std::string name;         ///< "tiny" for tiny.textproto
  std::string path;         ///< of the file
  std::string description;  ///< the first sentence of the file's first comment; may be empty
};

/// All of them, by name; none if the program was copied without them. FileError if the folder or a
/// file cannot be read.
std::vector<NamedConfig> named_configs();

/// The configuration of that name. ConfigError names the others.
NamedConfig named_config(const std::string& name);

/// The file that CONFIG on a command line means: `given` if there is such a file, otherwise the
/// configuration of that name. ConfigError if there is neither.
std::string config_file(const std::string& given);

/// The file that --machine means: `given` if there is such a file, otherwise the one of that name
/// in `configs/machines/`. ConfigError names those.
std::string machine_file(const std::string& given);

/// The first sentence of the comment with which `text` begins, lines joined, without '#' and the
/// full stop.
std::string first_sentence(const std::string& text);

}  // namespace lockstep
