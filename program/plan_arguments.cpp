#include "lockstep/program/plan_arguments.h"

#include "lockstep/core/check.h"
#include "lockstep/program/standard_descriptors.h"

namespace lockstep {
namespace {

std::string name_of(const CLI::App& command) {
  const std::string name = command.get_name();
  return name == "plan" ? name : "plan " + name;
}

}  // namespace

std::string given(const CLI::App& command) {
  std::string text = name_of(command);
  for (const CLI::Option* option : command.parse_order()) {
    if (!option->get_positional()) text += " " + option->get_name();
    if (option->get_items_expected_max() > 0)
      text += fmt::format(" {}", fmt::join(option->results(), ","));
  }
  return text;
}

void flush_output(const CLI::App& command) { flush_standard_output(name_of(command)); }

}  // namespace lockstep
