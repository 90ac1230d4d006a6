#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/input_file.h"
#include "lockstep/planner/audit_plan.h"
#include "lockstep/program/argument_checks.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/named_configs.h"
#include "lockstep/program/standard_descriptors.h"
#include "lockstep/training/run_files.h"

namespace lockstep {
namespace {

constexpr int64_t kMostBytes = int64_t{1} << 32;

/// A or B on the command line.
struct Side {
  const char* name;
  std::string what = {};
  std::vector<std::string> overrides = {};
  std::optional<int64_t> world_size = {};
};

struct DiffArguments {
  Side a = {.name = "A"}, b = {.name = "B"};
  std::vector<std::string> overrides;
  std::optional<int64_t> world_size;
  bool json = false;
};

/// Whether the file begins as JSON does and no configuration.
bool begins_as_json(const std::string& path) {
  if (kind_of_file(path) != FileKind::regular) return false;
  try {
    std::string begin(64, '\0');
    begin.resize(InputFile(path).read(begin.data(), begin.size()));
    const size_t at = begin.find_first_not_of(" \t\r\n");
    return at != std::string::npos && (begin[at] == '{' || begin[at] == '[');
  } catch (const FileError&) {
    return false;  // said when it is read as a configuration
  }
}

/// The report that `side` names; empty if it is a configuration.
std::string report_of(const Side& side) {
  if (kind_of_file(side.what) == FileKind::folder) return run_files(side.what).audit;
  return side.what.ends_with(".json") || begins_as_json(side.what) ? side.what : "";
}

/// Whether the first line is a JSON document and more follows, as in a metrics.jsonl.
bool has_documents_in_lines(const std::string& text) {
  const size_t line = text.find('\n');
  return line != std::string::npos && text.find_first_not_of(" \t\r\n", line) != text.npos &&
         nlohmann::json::accept(text.begin(), text.begin() + static_cast<std::ptrdiff_t>(line));
}

AuditReport read_report(const std::string& path) {
  const std::string text = read_file(path, kMostBytes, /*follow_links=*/true);
  try {
    return parse_audit_report(text, path);
  } catch (const FileError&) {
    if (!has_documents_in_lines(text)) throw;
    fail<FileError>("{}: no audit: document: found one on each line, allowed: one in the file",
                    path);
  }
}

/// An error of a configuration without the words that name it.
std::string reason_of(const ConfigError& error, const Side& side) {
  std::string reason = error.what();
  for (const std::string& name : {std::string("CONFIG: "), "'" + side.what + "' "})
    if (reason.starts_with(name)) reason.erase(0, name.size());
  return reason;
}

AuditReport audit_of(const Side& side, const DiffArguments& arguments) {
  if (const std::string report = report_of(side); !report.empty()) {
    require<ConfigError>(side.overrides.empty() && !side.world_size,
                         "{} '{}' is a report: found options of a configuration for it, allowed: "
                         "none",
                         side.name, side.what);
    return read_report(report);
  }
  std::vector<std::string> overrides = arguments.overrides;
  overrides.insert(overrides.end(), side.overrides.begin(), side.overrides.end());
  try {
    return plan_audit(load_config(config_file(side.what), overrides),
                      side.world_size ? side.world_size : arguments.world_size);
  } catch (const ConfigError& error) {
    fail<ConfigError>("{} '{}': {}", side.name, side.what, reason_of(error, side));
  }
}

void diff(const DiffArguments& arguments) {
  const bool are_reports = !report_of(arguments.a).empty() && !report_of(arguments.b).empty();
  require<ConfigError>(!are_reports || (arguments.overrides.empty() && !arguments.world_size),
                       "--set, --world-size: found beside two reports, allowed: with a "
                       "configuration");
  const AuditReport a = audit_of(arguments.a, arguments), b = audit_of(arguments.b, arguments);
  const AuditComparison found = compare_audits(a, b, arguments.a.what, arguments.b.what);
  std::cout << (arguments.json ? to_json(found) : to_text(found));
  flush_standard_output("audit diff");
  if (!found.equivalent()) throw ExitStatus{1, ""};
}

void add_side(CLI::App& command, Side& side, const std::string& suffix) {
  command
      .add_option(side.name, side.what,
                  "A report (audit.json of `lockstep train --audit`, or the output of `lockstep "
                  "plan audit --json`), the folder of a run that has one, or a configuration, for "
                  "which the audit is computed")
      ->required()
      ->check(check_path);
  command
      .add_option("--set-" + suffix, side.overrides,
                  fmt::format("Like --set, but only for {}; applied after --set", side.name))
      ->type_name("PATH=VALUE")
      ->allow_extra_args(false)
      ->take_all();
  command
      .add_option("--world-size-" + suffix, side.world_size,
                  fmt::format("Like --world-size, but only for {}", side.name))
      ->check(check_integer);
}

constexpr const char* kDiffFooter =
    "Two layouts are equivalent if they train identically: each trained parameter gets the same "
    "terms with the same factor, divided by the same tokens or averaged, counts the same number of "
    "times in the gradient norm, has the same number of elements, and is updated by the same rule "
    "with the same numbers. Ranks, groups, buckets and padding of the vocabulary may differ. "
    "Copies of a tied parameter count as one, under the name of the first copy.\n"
    "JSON: equivalent; parameters (their number); differences; layouts (what may differ). Each "
    "entry of the last two has parameter (empty: the whole job), field, a, b. Fields of "
    "differences: gradient, norm, update, padding, elements, held (by which ranks, if one side "
    "lacks the parameter); for the whole job: scaling, elements in the norm, elements in the count "
    "of zeros.\n"
    "Exit status: 0 equivalent; 1 not equivalent, or a report cannot be read.";

}  // namespace

void add_audit_command(CLI::App& program) {
  auto arguments = std::make_shared<DiffArguments>();
  CLI::App* const audit = program.add_subcommand(
      "audit", "Compare audits of `lockstep plan audit` and `train --audit`");
  audit->require_subcommand(1);
  CLI::App* const command = audit->add_subcommand(
      "diff", "Compare how each gradient is reduced in two layouts or two runs");
  add_side(*command, arguments->a, "a");
  add_side(*command, arguments->b, "b");
  command
      ->add_option(
          "--set", arguments->overrides,
          "Override a field of the configurations. May be repeated; if a field is set twice, "
          "the later value is used")
      ->type_name("PATH=VALUE")
      ->allow_extra_args(false)
      ->take_all();
  command
      ->add_option("--world-size", arguments->world_size,
                   "Number of ranks of the configurations; unset: the fewest that their layout "
                   "allows, a multiple of tensor x context x pipeline and expert tensor x expert x "
                   "pipeline")
      ->check(check_integer);
  command->add_flag("--json", arguments->json, "Print one JSON document");
  command->footer(kDiffFooter);
  command->callback([arguments] { diff(*arguments); });
}

}  // namespace lockstep
