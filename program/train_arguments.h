#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "lockstep/core/config.h"

namespace lockstep {

/// What `train` is given on the command line.
struct TrainArguments {
  std::string config_path;
  std::vector<std::string> overrides;
  std::string output;
  bool print_config = false;
  std::string profile;
  std::string task;
  size_t overrides_before_task = 0;  ///< on the command line, where the later one wins
  bool audit = false;
};

/// Adds all options of `train`. `launch` reads them too, without libtorch, to learn how its ranks
/// will train.
void add_train_options(CLI::App& command, TrainArguments& arguments);

/// The configuration that they name. ConfigError or FileError.
Config load_train_config(const TrainArguments& arguments);

}  // namespace lockstep
