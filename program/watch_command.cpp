#include <poll.h>

#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/input_file.h"
#include "lockstep/program/argument_checks.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/signals.h"
#include "lockstep/program/standard_descriptors.h"
#include "lockstep/program/terminal.h"
#include "lockstep/training/run_files.h"
#include "lockstep/training/run_view.h"

namespace lockstep {
namespace {

struct WatchArguments {
  std::string run;
  bool once = false;
  double interval = 1;
};

/// Sets the facts from config.textproto; a file of another version gives none.
void read_config(const std::string& path, RunFacts& facts) {
  if (kind_of_file(path) != FileKind::regular) return;
  try {
    const Config config = load_config(path);
    facts.train_iters = config.train.train_iters;
    facts.layout = layout_text(config.parallel);
  } catch (const ConfigError&) {
    facts.train_iters.reset();
  }
}

/// The files of a run, which are polled.
class WatchedRun {
 public:
  explicit WatchedRun(const std::string& run) : reader_(metrics_path(run), fields_of_run_view()) {
    const std::filesystem::path folder = std::filesystem::path(reader_.path()).parent_path();
    files_ = run_files(folder.empty() ? "." : folder.string());
    facts_.name = run;
  }

  /// Reads what is new; returns whether there was anything.
  bool look() {
    const bool changed = reader_.read_more();
    // A run that resumes writes its configuration before its lines.
    if (changed || !facts_.train_iters) read_config(files_.config, facts_);
    facts_.seconds_since_line = seconds_since_change(reader_.path());
    facts_.ended = has_ended();
    return changed;
  }

  bool ended() const { return facts_.ended; }
  std::vector<std::string> view(const TerminalSize& size) const {
    return run_view(facts_, reader_.metrics(), size);
  }

 private:
  /// A run writes its picture when it ends; one that was killed after its last iteration does not.
  bool has_ended() const {
    constexpr double kQuiet = 600;  // the last validation and save may take long
    if (is_newer(files_.loss_svg, reader_.path())) return true;
    return facts_.train_iters && reader_.metrics().last_iteration >= *facts_.train_iters &&
           facts_.seconds_since_line >= kQuiet;
  }

  MetricsReader reader_;
  RunFiles files_;
  RunFacts facts_;
};

/// Waits for the time or a signal. Returns whether a signal came.
bool wait_for_signal(double seconds) {
  ::poll(nullptr, 0, static_cast<int>(seconds * 1000));
  return noted_signal() != 0;
}

bool same_size(const TerminalSize& a, const TerminalSize& b) {
  return a.columns == b.columns && a.rows == b.rows;
}

/// Shows the run until it ends or a signal comes; returns the last view.
std::vector<std::string> follow(WatchedRun& run, double interval) {
  constexpr double kLook = 0.2;    // seconds between checks of the size and for signals
  constexpr double kLeast = 0.01;  // also with --interval 0
  TerminalPicture picture;
  TerminalSize size;
  double left = 0;
  while (true) {
    const TerminalSize now = terminal_size();
    const bool look = left <= 0;
    if (look) {
      run.look();
      left = interval;
    }
    if (look || !same_size(now, size)) picture.show(run.view(size = now));
    flush_standard_output("watch");
    if (run.ended() || wait_for_signal(std::min(kLook, std::max(kLeast, left))))
      return run.view(size);
    left -= kLook;
  }
}

void watch(const WatchArguments& arguments) {
  WatchedRun run(arguments.run);
  run.look();
  if (arguments.once || run.ended() || !terminal_can_redraw()) {
    print_lines(run.view(terminal_size()));
    return;
  }
  note_sigint();
  note_sigterm();
  print_lines(follow(run, arguments.interval));
}

}  // namespace

void add_watch_command(CLI::App& program) {
  auto arguments = std::make_shared<WatchArguments>();
  CLI::App* const command = program.add_subcommand(
      "watch", "Show a run in the terminal: loss, rates, time, memory, the slowest rank");
  command
      ->add_option("RUN", arguments->run,
                   "Folder given to `lockstep train` as --output, or a metrics.jsonl")
      ->required();
  command->add_flag("--once", arguments->once,
                    "Print the run as it is now and exit. This is the default if standard output "
                    "is not a terminal");
  command->add_option("--interval", arguments->interval, "Seconds between updates, at least 0.01")
      ->check(check_not_negative)
      ->capture_default_str();
  command->footer("Ends when the run ends, or on Ctrl-C, which does not stop the run.");
  command->callback([arguments] { watch(*arguments); });
}

}  // namespace lockstep
