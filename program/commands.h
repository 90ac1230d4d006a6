#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace lockstep {

/// Each adds one command to the program. A command runs in its callback and throws lockstep::Error.
void add_configs_command(CLI::App& program);
void add_data_command(CLI::App& program);
void add_train_command(CLI::App& program);
void add_evaluate_command(CLI::App& program);
void add_generate_command(CLI::App& program);
void add_score_command(CLI::App& program);
void add_doctor_command(CLI::App& program);
void add_plot_command(CLI::App& program);
void add_watch_command(CLI::App& program);
void add_trace_command(CLI::App& program);
void add_audit_command(CLI::App& program);

/// These two describe all commands of the program, also those that are added later.
void add_completion_command(CLI::App& program);
void add_man_command(CLI::App& program);

/// Adds the parts of `plan` that need no libtorch; returns the command.
CLI::App* add_plan_command(CLI::App& program);
/// Adds `verify` to it, which needs libtorch.
void add_plan_verify_command(CLI::App& plan);
/// Adds `time` to it, which needs libtorch, too.
void add_plan_time_command(CLI::App& plan);
void add_plan_best_command(CLI::App& plan);
/// Makes `plan` itself take a configuration and report on its job.
void add_plan_report(CLI::App& plan);

/// Adds `checkpoint inspect` and `checkpoint verify`, which need no libtorch; returns the command.
CLI::App* add_checkpoint_command(CLI::App& program);
/// Adds `export` and `import` to it, which need libtorch.
void add_checkpoint_conversions(CLI::App& checkpoint);

/// Add `launch`, whose ranks have the command line `arguments`, and `megatron-flags`, which applies
/// `flags` last: what stands after "--", which run_program_with_words() takes.
void add_launch_command(CLI::App& program, const std::vector<std::string>& arguments = {});
void add_megatron_flags_command(CLI::App& program, const std::vector<std::string>& flags = {});

/// Adds CONFIG and --set, which load_config() takes.
void add_config_options(CLI::App& command, std::string& path, std::vector<std::string>& overrides,
                        bool required = true);

/// The schema of the configuration, for `lockstep train --help`.
std::string config_help();

/// Lets the C library keep the memory of freed tensors for the next ones. Otherwise every operation
/// returns it to the system and gets it back page by page: 15 % of the time of
/// configs/tiny.textproto on two ranks.
void keep_freed_memory();

/// Prints "lockstep: ..." to standard error; nothing for an empty note.
void print_note(const std::string& note);
/// Prints doubt_about_newest() of a folder whose newest checkpoint the command uses, as a note.
void note_doubt(const std::string& checkpoints);

/// Ends the program with `status` and, unless it is empty, `message`.
struct ExitStatus {
  int status;
  std::string message;
};

}  // namespace lockstep
