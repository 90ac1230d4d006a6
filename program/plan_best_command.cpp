#include <algorithm>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/counted.h"
#include "lockstep/planner/machine.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/named_configs.h"
#include "lockstep/program/plan_arguments.h"
#include "lockstep/training/layout_search.h"

namespace lockstep {
namespace {

struct BestArguments {
  std::string config_path, machine_path;
  std::vector<std::string> overrides;
  LayoutSearchOptions options;
  double memory_gib = 0;
  bool json = false;
};

/// The parts of a step's time in ms, averaged over all ranks.
std::map<std::string, double> parts_of(const StepTime& time) {
  std::map<std::string, double> parts = {{"compute", 1e3 * time.compute_s()},
                                         {"bubble", 1e3 * time.bubble_s()},
                                         {"optimizer", 1e3 * time.optimizer_s()}};
  int64_t ranks = 0;
  for (const RankTime& rank : time.ranks) ranks += rank.num_ranks;
  for (const RankTime& rank : time.ranks)
    for (const auto& [group, seconds] : rank.exposed_s)
      parts["exposed " + group] +=
          1e3 * seconds * static_cast<double>(rank.num_ranks) / static_cast<double>(ranks);
  return parts;
}

/// The largest part other than compute.
std::string limit_of(const SimulatedLayout& layout) {
  const std::map<std::string, double> parts = parts_of(layout.time);
  const auto largest =
      std::max_element(parts.begin(), parts.end(), [](const auto& a, const auto& b) {
        return (a.first == "compute" ? 0 : a.second) < (b.first == "compute" ? 0 : b.second);
      });
  return fmt::format("{} {:.0f} %", largest->first,
                     100 * largest->second / (1e3 * layout.time.step_s));
}

/// The part in which a layout loses most against the best one.
std::string loss_of(const SimulatedLayout& layout, const SimulatedLayout& best) {
  std::map<std::string, double> more = parts_of(layout.time);
  for (const auto& [part, ms] : parts_of(best.time)) more[part] -= ms;
  const auto largest = std::max_element(
      more.begin(), more.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return largest->second <= 0 ? "" : fmt::format("{} +{:.2f} ms", largest->first, largest->second);
}

std::string set_line(const std::vector<std::string>& overrides) {
  std::string line;
  for (const std::string& one : overrides)
    line += fmt::format("{}--set {}", line.empty() ? "" : " ", one);
  return line;
}

void write_best_json(const LayoutSearch& search) {
  nlohmann::ordered_json json = {{"candidates", search.looked_at},
                                 {"legal", search.legal},
                                 {"too_large", search.too_large},
                                 {"simulated", search.simulated},
                                 {"search_seconds", search.search_s},
                                 {"best", nlohmann::ordered_json::array()},
                                 {"refused", nlohmann::ordered_json::array()}};
  for (const SimulatedLayout& layout : search.best)
    json["best"].push_back({{"step_ms", 1e3 * layout.time.step_s},
                            {"estimated_ms", 1e3 * layout.estimated_s},
                            {"peak_bytes", layout.peak_bytes},
                            {"parts_ms", parts_of(layout.time)},
                            {"set", layout.overrides}});
  for (const RefusedLayout& layout : search.refused)
    json["refused"].push_back({{"set", layout.overrides}, {"reason", layout.reason}});
  std::cout << json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) << "\n";
}

/// "2 layouts refused, the first (--set ...): ..."
std::string refusals_of(const LayoutSearch& search) {
  const RefusedLayout& first = search.refused.front();
  return fmt::format("{} refused, the first ({}): {}",
                     counted(static_cast<int64_t>(search.refused.size()), "layout"),
                     first.overrides.empty() ? "as configured" : set_line(first.overrides),
                     first.reason);
}

void write_best_text(const LayoutSearch& search, const Machine& machine) {
  std::cout << fmt::format("{}, {} legal, {} too large, {} simulated on {}\n",
                           counted(search.looked_at, "candidate"), search.legal, search.too_large,
                           search.simulated, machine.name);
  for (size_t i = 0; i < search.best.size(); ++i) {
    const SimulatedLayout& layout = search.best[i];
    const std::string loss = loss_of(layout, search.best.front());
    std::cout << fmt::format(
        "\n{:>2}. {:.2f} ms a step, {:.2f} GiB; largest cost besides compute: "
        "{}{}\n    {}\n",
        i + 1, 1e3 * layout.time.step_s, static_cast<double>(layout.peak_bytes) / 0x1p30,
        limit_of(layout), loss.empty() ? "" : fmt::format("; compared with the best: {}", loss),
        layout.overrides.empty() ? "as configured" : set_line(layout.overrides));
  }
  if (!search.refused.empty()) std::cout << "\n" << refusals_of(search) << "\n";
}

std::string no_layout_reason(const BestArguments& arguments, const LayoutSearch& search) {
  const LayoutSearchOptions& options = arguments.options;
  if (search.legal == 0)
    return fmt::format("found no legal layout of {} ranks{}", options.space.world_size,
                       search.why_illegal.empty() ? "" : "; as configured: " + search.why_illegal);
  const std::string counts = fmt::format("{} legal, {} too large", search.legal, search.too_large);
  if (search.refused.empty())
    return fmt::format("no layout of {} ranks fits {} GiB: {}", options.space.world_size,
                       arguments.memory_gib, counts);
  return fmt::format("found no layout of {} ranks within {} GiB: {}, {}", options.space.world_size,
                     arguments.memory_gib, counts, refusals_of(search));
}

void plan_best(const CLI::App& command, BestArguments& arguments) {
  const Machine machine = load_machine(machine_file(arguments.machine_path));
  const auto load = [&](const std::vector<std::string>& more) {
    std::vector<std::string> overrides = arguments.overrides;
    overrides.insert(overrides.end(), more.begin(), more.end());
    return load_config(arguments.config_path, overrides);
  };
  load({});  // an error in it is not about a layout
  arguments.options.memory_bytes = 0x1p30 * arguments.memory_gib;
  arguments.options.progress = [](const std::string& overrides) {
    std::cerr << "simulating " << (overrides.empty() ? "the configuration" : overrides) << "\n";
  };
  LayoutSearch search;
  try {
    search = search_layouts(load, arguments.options, machine);
  } catch (const Error& error) {  // also sizes that do not fit into 64 bits
    fail<ConfigError>("{}", with_option_names(command, error.what()));
  }
  if (arguments.json)
    write_best_json(search);
  else
    write_best_text(search, machine);
  flush_output(command);
  if (search.best.empty()) throw ExitStatus{1, no_layout_reason(arguments, search)};
}

constexpr const char* kBestFooter =
    "Searches all legal layouts of the ranks: tensor (with sequence parallelism), context, "
    "pipeline and expert parallelism, chunks of a pipeline rank, optimizer instances, "
    "micro-batches of 1, 2, 4, 8 and 16 sequences, recomputation and sharding. A formula estimates "
    "each layout. The best that fit in memory are simulated, as by `lockstep plan time`, and "
    "verified, as by `lockstep plan verify`; the next ones replace layouts that fail "
    "verification. For the fastest three, other pipeline schedules and "
    "bucket sizes are simulated too. Only simulated layouts are listed. train.global_batch_size "
    "must be set and is not changed.\n"
    "Do not set fields in CONFIG that a layout would have to unset: virtual pipeline stages, "
    "model.recompute_num_layers, a split of the layers.\n"
    "JSON: candidates, legal, too_large, simulated, search_seconds (before simulation); best, "
    "fastest first (step_ms, estimated_ms, peak_bytes, parts_ms, set); refused (set, reason).";

}  // namespace

void add_plan_best_command(CLI::App& plan) {
  auto arguments = std::make_shared<BestArguments>();
  LayoutSearchOptions& options = arguments->options;
  CLI::App* const command =
      plan.add_subcommand("best", "Find the fastest layouts of a job on a machine");
  add_config_options(*command, arguments->config_path, arguments->overrides);
  add_machine_options(*command, options.space.world_size, arguments->machine_path);
  command
      ->add_option("--memory", arguments->memory_gib, "Memory of a device, in units of 2^30 bytes")
      ->type_name("GIB")
      ->required()
      ->check(check_positive);
  command
      ->add_option("--simulate", options.num_simulated,
                   "Number of layouts to simulate, not counting those that fail verification")
      ->capture_default_str()
      ->check(check_at_least(1));
  command
      ->add_option("--keep", options.space.kept,
                   "Field that keeps its value from CONFIG; may be repeated")
      ->type_name("FIELD")
      ->allow_extra_args(false)
      ->take_all();
  command->add_flag("--json", arguments->json, "Print one JSON document");
  command->footer(kBestFooter);
  command->callback([command, arguments] { plan_best(*command, *arguments); });
}

}  // namespace lockstep
