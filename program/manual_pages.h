#pragma once

#include <string>
#include <vector>

#include "lockstep/core/config_io.h"
#include "lockstep/program/command_texts.h"

namespace lockstep {

/// A page of section 1 of the manual.
struct ManualPage {
  std::string name;  ///< "lockstep-plan-groups"
  std::string text;  ///< troff, for the macros `man`
};

/// One page for each of `commands`. The page of `train` describes `fields`, too.
std::vector<ManualPage> manual_pages(const std::vector<CommandText>& commands,
                                     const std::vector<ConfigField>& fields);

}  // namespace lockstep
