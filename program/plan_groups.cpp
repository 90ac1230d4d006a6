#include <iostream>
#include <memory>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/group_listing.h"
#include "lockstep/parallel_state/parallel_axes.h"
#include "lockstep/program/plan_arguments.h"

namespace lockstep {
namespace {

struct GroupsArguments {
  ParallelSizes sizes;
  GroupListing listing;
  bool json = false;
};

void plan_groups(const CLI::App& command, const GroupsArguments& arguments) {
  try {
    const RankGrids grids(arguments.sizes);
    (arguments.json ? write_groups_json : write_groups_text)(std::cout, grids, arguments.listing);
  } catch (const ConfigError& error) {
    fail<ConfigError>("{}", with_option_names(command, error.what()));
  }
  flush_output(command);
}

void add_size_options(CLI::App& command, ParallelSizes& sizes) {
  command.add_option("--world-size", sizes.world_size, "Number of ranks of the job")
      ->required()
      ->check(check_integer);
  const auto add = [&](const std::string& name, auto& size, const char* meaning) {
    command.add_option("--" + name, size, meaning)->capture_default_str()->check(check_integer);
  };
  for (const ParallelSize* size : parallel_size_table())
    if (*size->meaning)
      std::visit([&](auto member) { add(size->name, sizes.*member, size->meaning); },
                 size->in_sizes);
  command
      .add_option("--order", sizes.order,
                  "Axes from the fastest varying to the slowest; those of size 1 may be left out")
      ->capture_default_str();
  add("optimizer-instances", sizes.optimizer_instances,
      "Number of replicas of the distributed optimizer; must divide dp x cp and the experts' dp");
  const auto set_levels = [&sizes](const std::string& text) {
    sizes.hierarchical_context = parse_integers(text, ',');
  };
  command
      .add_option_function<std::string>(
          "--hierarchical-context", set_levels,
          "Sizes of the levels of context parallelism, the first varying fastest; their product "
          "is --context")
      ->type_name("INT,INT,...")
      ->check(check_integers);
}

}  // namespace

void add_plan_groups_command(CLI::App& plan) {
  auto arguments = std::make_shared<GroupsArguments>();
  CLI::App* const command =
      plan.add_subcommand("groups", "List the ranks of every process group of a job");
  add_size_options(*command, arguments->sizes);
  CLI::Option* const rank = command
                                ->add_option("--rank", arguments->listing.rank,
                                             "List only the groups that contain this rank")
                                ->check(check_integer);
  command
      ->add_flag("--summary", arguments->listing.summary,
                 "Print only the number of groups of each kind, and their size in ranks")
      ->excludes(rank);
  command->add_flag("--json", arguments->json, "Print one JSON document");
  command->footer(
      "JSON: world_size, order, sizes (ranks of each axis; etp and edp are those of experts), and "
      "groups: for each kind a list of groups, each a list of ranks. With --summary, for each kind "
      "count and size (in ranks) instead.");
  command->callback([command, arguments] { plan_groups(*command, *arguments); });
}

}  // namespace lockstep
