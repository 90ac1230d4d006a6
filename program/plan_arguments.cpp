#include "lockstep/program/plan_arguments.h"

#include "lockstep/core/check.h"
#include "lockstep/program/standard_descriptors.h"

namespace lockstep {

std::string given(const CLI::App& command) {
  std::string text = "plan " + command.get_name();
  for (const CLI::Option* option : command.parse_order()) {
    if (!option->get_positional()) text += " " + option->get_name();
    if (option->get_items_expected_max() > 0)
      text += fmt::format(" {}", fmt::join(option->results(), ","));
  }
  return text;
}

void flush_output(const CLI::App& command) { flush_standard_output("plan " + command.get_name()); }

}  // namespace lockstep
