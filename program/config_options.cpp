#include "lockstep/program/commands.h"
#include "lockstep/program/named_configs.h"

namespace lockstep {

void add_config_options(CLI::App& command, std::string& path, std::vector<std::string>& overrides,
                        bool required) {
  command
      .add_option("CONFIG", path,
                  "Configuration: a text protobuf file, or the name of one that `lockstep configs` "
                  "lists")
      ->required(required)
      ->transform(config_file);
  command
      .add_option(
          "--set", overrides,
          "Override a field of the configuration. May be repeated; if a field is set twice, "
          "the later value is used")
      ->type_name("PATH=VALUE")
      ->allow_extra_args(false)
      ->take_all();
}

}  // namespace lockstep
