#include <algorithm>
#include <iostream>
#include <memory>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/planner/audit_plan.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/plan_arguments.h"
#include "lockstep/training/supported_config.h"

namespace lockstep {
namespace {

struct AuditArguments {
  std::string config_path;
  std::vector<std::string> overrides;
  std::optional<int64_t> world_size;
  std::string ranks;
  bool json = false;
};

void plan_audit_of(const CLI::App& command, const AuditArguments& arguments) {
  const Config config = load_config(arguments.config_path, arguments.overrides);
  try {
    check_supported(config);
    std::vector<int64_t> ranks = parse_integers(arguments.ranks, ',');
    const AuditReport report = plan_audit(config, arguments.world_size, ranks);
    std::sort(ranks.begin(), ranks.end());
    const auto twice = std::adjacent_find(ranks.begin(), ranks.end());
    require<ConfigError>(twice == ranks.end(), "--rank: found {} twice, allowed: once",
                         twice == ranks.end() ? 0 : *twice);
    std::cout << (arguments.json ? to_json(report) : to_text(report));
  } catch (const Error& error) {
    fail<ConfigError>("{}", with_option_names(command, error.what()));
  }
  flush_output(command);
}

constexpr const char* kAuditFooter =
    "The report is derived from the layers' descriptions of their parameters; `lockstep train "
    "--audit` measures the same. \"1 x ranks [0, 1]\": the gradients of these ranks are added, "
    "each times 1. \"divided by the tokens of ranks [0, 1]\": by the sum of the tokens that these "
    "ranks count.\n"
    "JSON: world_size, layout, scaling, and for each of ranks: rank; norm_elements and "
    "zero_elements (elements of the model that the gradient norm and the count of zeros count); "
    "and for each of its parameters: name; chunk (which of the rank's model chunks); shape (on the "
    "rank); description; reduction (its bucket, and the ranks over which it is reduced); first and "
    "last (the elements whose final gradient the rank holds, a half-open range); terms (numerator, "
    "denominator, ranks); token_ranks; counted (in the gradient norm, by this rank); update (rule, "
    "state, learning rates, weight decay, factor and largest norm of the gradients); tie (its "
    "name); copies (ranks of a model that hold the same elements); replicas (data-parallel ranks "
    "that hold them); effect (terms and tokens independent of the layout); problem (of a "
    "measurement; empty here).";

}  // namespace

void add_plan_audit_command(CLI::App& plan) {
  auto arguments = std::make_shared<AuditArguments>();
  CLI::App* const command = plan.add_subcommand(
      "audit", "Show which ranks' gradients contribute to each parameter, and with which factor");
  add_config_options(*command, arguments->config_path, arguments->overrides);
  add_optional_world_size(*command, arguments->world_size);
  command->add_option("--rank", arguments->ranks, "Ranks to report; unset: all")
      ->type_name("INT,INT,...")
      ->check(check_integers);
  command->add_flag("--json", arguments->json, "Print one JSON document");
  command->footer(kAuditFooter);
  command->callback([command, arguments] { plan_audit_of(*command, *arguments); });
}

}  // namespace lockstep
