#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>

#include "lockstep/checkpoint/finite_values.h"
#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/counted.h"
#include "lockstep/datasets/unfinished_file.h"
#include "lockstep/planner/stage_shapes.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/rounds.h"
#include "lockstep/program/signals.h"
#include "lockstep/program/standard_descriptors.h"
#include "lockstep/program/terminal.h"
#include "lockstep/program/train_arguments.h"
#include "lockstep/program/train_audit.h"
#include "lockstep/training/profile_window.h"
#include "lockstep/training/progress.h"
#include "lockstep/training/run_checkpoints.h"
#include "lockstep/training/run_files.h"
#include "lockstep/training/run_plot.h"
#include "lockstep/training/sample_text.h"
#include "lockstep/training/schedule_notes.h"
#include "lockstep/training/tensorboard_file.h"
#include "lockstep/training/trainer.h"

namespace lockstep {
namespace {

/// Exit statuses.
constexpr int kStopped = 3;
constexpr int kDiverged = 4;

/// ", products in fp8 (hybrid, delayed),"
std::string products_of(const TrainConfig& config) {
  if (config.fp8 == Fp8Format::none) return "";
  return fmt::format(", products in fp8 ({}, {}),", to_string(config.fp8),
                     to_string(config.fp8_recipe));
}

/// The width of the terminal that shows progress; empty if there is none.
std::function<int()> terminal_columns() {
  if (!terminal_can_redraw(STDERR_FILENO)) return nullptr;
  return [] { return terminal_size(STDERR_FILENO).columns; };
}

/// Reports the run on rank 0.
class Reporter {
 public:
  Reporter(const Config& config, c10::Device device)
      : config_(resolve_for_device(config, device.is_cpu())),
        device_(device),
        display_(std::cerr, terminal_columns(), config.train.train_iters,
                 config.train.log_interval) {}

  void begin(Trainer& trainer, int64_t ranks, const std::string& output) {
    if (!output.empty()) {
      const TrainingProgress progress = trainer.progress();
      file_ = std::make_unique<MetricsFile>(
          output, MetricsResume{progress.iteration, progress.metrics_checksum});
      if (!file_->note().empty()) display_.message(file_->note());
      begin_folder(output);
      if (trainer.config().train.tensorboard)
        tensorboard_ =
            std::make_unique<TensorBoardFile>(output + "/tensorboard", progress.iteration + 1);
    }
    last_iteration_ = trainer.iteration();
    const Config& config = trainer.config();
    const auto millions = [](int64_t parameters) {
      return fmt::format("{:.2f}M", static_cast<double>(parameters) / 1e6);
    };
    const std::string active =
        config.model.num_experts
            ? fmt::format(" ({} active per token)", millions(num_active_parameters(config)))
            : "";
    const std::string frozen =
        config.lora.rank ? fmt::format("{} of ", millions(num_trained_parameters(config))) : "";
    display_.message(
        fmt::format("training {}{} parameters{} in {}{} on {} ({}), {} of {} per iteration", frozen,
                    millions(num_parameters(config)), active, to_string(config.train.precision),
                    products_of(config.train), counted(ranks, "data-parallel rank"), device_.str(),
                    counted(trainer.batches().full().global, "sequence"),
                    counted(config.model.seq_length, "token")));
    if (trainer.iteration() > 0 && trainer.iteration() >= config.train.train_iters)
      display_.message(fmt::format("nothing is left to train: train.train_iters is {}",
                                   config.train.train_iters));
  }
  void iteration(const IterationMetrics& metrics) {
    last_iteration_ = metrics.iteration;
    write(metrics);
    display_.iteration(metrics, metrics.memory_bytes.value_or(0));
  }
  /// A checkpoint of the state after the last iteration follows.
  void before_save() {
    try {
      if (file_) file_->sync();
    } catch (const FileError& error) {
      display_.message(error.what());
    }
  }
  /// The run has loaded the checkpoint at `path`; empty: there is none, and the run goes on.
  void go_back(Trainer& trainer, const std::string& path) {
    if (path.empty())
      return display_.message(
          "spike: there is no checkpoint to rewind to, so the update is "
          "skipped");
    const TrainingProgress progress = trainer.progress();
    display_.message(
        fmt::format("spike: rewound to {}, iteration {}; the samples since then are "
                    "left out",
                    path, progress.iteration));
    if (folder_.empty()) return;
    file_->go_back(progress.iteration);
    if (tensorboard_) tell(tensorboard_->go_back(progress.iteration + 1));
  }
  void validation(const ValidationMetrics& metrics) {
    write(metrics);
    display_.validation(metrics);
  }
  void test(const TestMetrics& metrics) {
    write(metrics);
    display_.test(metrics);
  }
  void message(const std::string& text) { display_.message(text); }
  /// Writes the picture of the loss, if possible.
  void end() {
    if (folder_.empty() || last_iteration_ == 0) return;
    try {
      write_loss_svg(folder_);
    } catch (const Error& error) {
      display_.message(fmt::format("no loss.svg: {}", error.what()));
    }
  }

 private:
  template <class Metrics>
  void write(const Metrics& metrics) {
    if (file_) file_->write(to_json(metrics));
    if (!tensorboard_) return;
    tell(tensorboard_->write(metrics.iteration, to_scalars(metrics)));
  }

  /// A warning; empty: there is none.
  void tell(const std::string& warning) {
    if (!warning.empty()) display_.message(warning);
  }

  void begin_folder(const std::string& folder) {
    folder_ = folder;
    const RunFiles files = run_files(folder);
    std::error_code error;
    std::filesystem::remove(files.loss_svg, error);  // of the run's earlier part
    write_output_file(files.config, print_config(config_));
  }

  const Config config_;  ///< as given, with the device's defaults but without computed batches
  std::string folder_;
  int64_t last_iteration_ = 0;
  c10::Device device_;
  ProgressDisplay display_;
  std::unique_ptr<MetricsFile> file_;
  std::unique_ptr<TensorBoardFile> tensorboard_;
};

constexpr char kMetricsHelp[] =
    "OUTPUT/metrics.jsonl has a JSON object for each iteration: iteration (from 1), lm_loss (nats, "
    "mean over the tokens of the global batch), grad_norm (2-norm before clipping), learning_rate, "
    "consumed_samples (sequences, of all iterations so far), num_tokens (of the global batch), "
    "iteration_ms (milliseconds), tokens_per_second (of all ranks together), skipped (true: "
    "nothing was updated), model_tflops_per_device (TFLOP/s), memory_bytes and peak_memory_bytes "
    "(of rank 0). A validation adds iteration, validation_loss (nats, mean over tokens) and "
    "perplexity (its exponential); the test of a finished run adds iteration, test_loss and "
    "test_perplexity. Some settings add fields, which docs/formats.md lists.";

std::string save_folder(const Config& config, const std::string& output) {
  if (config.checkpoint.save) return *config.checkpoint.save;
  return output.empty() ? "" : output + "/checkpoint";
}

/// Checks what can be known before the run starts.
void check_sample(const Config& config, const std::string& folder) {
  require<ConfigError>(
      config.train.sample_tokens == 0 || !folder.empty() || holds_whole_model(config),
      "train.sample_tokens: found {}, allowed where several ranks hold the model: "
      "0, or with checkpoint.save or --output, because the text is generated from "
      "the checkpoint",
      config.train.sample_tokens);
}

RunEnd requested_stop(const ParallelState& state) {
  if (state.lost_launcher()) return RunEnd::launcher_lost;
  const int signal = noted_signal();
  if (signal == 0) return RunEnd::none;
  return signal == SIGINT ? RunEnd::sigint : RunEnd::sigterm;
}

std::string stop_message(const Trainer& trainer, const std::string& folder) {
  return fmt::format(
      "{}: stopped after iteration {}{}", name_of(trainer.end()), trainer.iteration(),
      folder.empty() ? "; nothing is saved without checkpoint.save or --output" : "");
}

/// Null without --profile.
std::unique_ptr<ProfileWindow> profile_window(const Config& config, const TrainArguments& arguments,
                                              const ParallelState& state) {
  if (arguments.profile.empty()) return nullptr;
  return std::make_unique<ProfileWindow>(
      parse_profile_range(arguments.profile, config.train.train_iters),
      run_files(arguments.output).traces, state);
}

template <class Tell>
void end_profile(ProfileWindow* profile, Tell tell) {
  if (!profile) return;
  profile->finish();
  if (!profile->problem().empty())
    print_note(profile->problem());
  else
    tell(profile->is_written() ? fmt::format("profile: wrote {}", profile->path())
                               : "profile: wrote nothing; this start ran none of these iterations");
}

/// All ranks end with the status; rank 0 says why.
[[noreturn]] void end_as_diverged(const std::string& what, const Trainer& trainer,
                                  const RunCheckpoints& checkpoints, const ParallelState& state) {
  if (state.rank() != 0) throw ExitStatus{kDiverged, ""};
  const std::string good = checkpoints.describe_last_good(trainer);
  throw ExitStatus{
      kDiverged, fmt::format("{}training diverged: {}{}", state.world_size() > 1 ? "rank 0: " : "",
                             what, good.empty() ? "" : "; " + good)};
}

[[noreturn]] void end_as_stopped(const Trainer& trainer, const ParallelState& state) {
  if (trainer.end() != RunEnd::launcher_lost) throw ExitStatus{kStopped, ""};
  fail<CommunicationError>("{}; stopped after iteration {}",
                           state.lost_launcher().value_or("the launcher's store has exited"),
                           trainer.iteration());
}

/// A run on this rank, from its start or a checkpoint to its end.
class TrainRun {
 public:
  TrainRun(const Round& round, const Config& given, const TrainArguments& arguments)
      : config_(round.config),
        arguments_(arguments),
        state_(round.state),
        folder_(save_folder(config_, arguments.output)) {
    if (state_.rank() == 0) reporter_ = std::make_unique<Reporter>(given, state_.device());
    tell(unused_gpus(config_.train.device, state_.device()));
    tell(stronger_router_losses(config_));
    check_sample(config_, folder_);
    if (reporter_ && config_.train.sample_tokens > 0)
      sample_ = std::make_unique<SampleText>(config_);
    checkpoints_.emplace(config_.checkpoint, folder_, state_, round.start, &round.copies);
    trainer_ = std::make_unique<Trainer>(config_, state_, !checkpoints_->will_load());
    load();
    profile_ = profile_window(config_, arguments, state_);
  }

  void run() {
    note_sigint();
    try {
      trainer_->run(callbacks());
    } catch (const DivergenceError& error) {
      if (reporter_) reporter_->end();
      end_as_diverged(error.what(), *trainer_, *checkpoints_, state_);
    } catch (const std::exception& error) {
      // The others learn of it before this rank waits for its save to be given up.
      state_.post_failure(error.what());
      throw;
    }
    ignore_signals();
    tell(checkpoints_->finish());
    if (reporter_) reporter_->end();
    end_profile(profile_.get(), [&](const std::string& text) { tell(text); });
    if (trainer_->end() == RunEnd::diverged)
      end_as_diverged(trainer_->divergence(), *trainer_, *checkpoints_, state_);
    if (is_stop(trainer_->end())) end_as_stopped(*trainer_, state_);
    if (trainer_->config().train.sample_tokens > 0) write_sample();
  }

 private:
  /// Rank 0 shows it; empty: there is nothing to say.
  void tell(const std::string& text) {
    if (reporter_ && !text.empty()) reporter_->message(text);
  }

  void load() {
    for (const std::string& note : trainer_->notes()) tell(note);
    for (const std::string& note : schedule_notes(config_, trainer_->batches())) tell(note);
    const auto loaded = checkpoints_->load(*trainer_);
    tell(checkpoints_->note());
    if (loaded) tell(fmt::format("loaded {}, iteration {}", *loaded, trainer_->iteration()));
    if (reporter_)
      reporter_->begin(*trainer_, state_.grids().data_parallel_size(), arguments_.output);
    if (arguments_.audit) tell(audit_gradients(*trainer_, arguments_.output, state_));
  }

  TrainCallbacks callbacks() {
    TrainCallbacks result;
    result.should_stop = [&] {
      if (profile_) profile_->before(trainer_->iteration() + 1);
      return requested_stop(state_);
    };
    result.checkpoint = [&](bool last) { save(last); };
    result.go_back = [&] { return go_back(); };
    result.checkpoint_is_due = [&](int64_t iteration) {
      return checkpoints_->is_due(iteration) || (profile_ && profile_->ends_after(iteration));
    };
    result.iteration = [&](const IterationMetrics& metrics) {
      if (profile_) profile_->after(metrics.iteration);
      if (reporter_) reporter_->iteration(metrics);
    };
    if (!reporter_) return result;
    result.validation = [&](const ValidationMetrics& metrics) { reporter_->validation(metrics); };
    result.test = [&](const TestMetrics& metrics) { reporter_->test(metrics); };
    return result;
  }

  void save(bool last) {
    if (last && is_stop(trainer_->end())) tell(stop_message(*trainer_, folder_));
    if (reporter_ && checkpoints_->saves(trainer_->iteration(), last)) reporter_->before_save();
    tell(checkpoints_->after_iteration(*trainer_, last));
  }

  bool go_back() {
    tell(checkpoints_->finish());
    const std::string path = checkpoints_->go_back(*trainer_);
    if (reporter_) reporter_->go_back(*trainer_, path);
    return !path.empty();
  }

  void write_sample() {
    (void)trainer_->state(/*with_optimizer=*/false);  // gathers what is sharded over the ranks
    if (!standard_output_is_open())
      return tell("standard output is closed: the text of train.sample_tokens is not written");
    if (!sample_) return;
    exit_on_signals(kStopped);
    const std::string saved = folder_.empty() ? "" : checkpoints_->path();  // not what was loaded
    std::cout << sample_->write(std::move(trainer_), saved, state_.device()) << std::endl;
    ignore_signals();
  }

  const Config& config_;
  const TrainArguments& arguments_;
  const ParallelState& state_;
  const std::string folder_;
  std::unique_ptr<Reporter> reporter_;  ///< on rank 0
  std::unique_ptr<const SampleText> sample_;
  std::optional<RunCheckpoints> checkpoints_;
  std::unique_ptr<Trainer> trainer_;
  std::unique_ptr<ProfileWindow> profile_;  ///< null without --profile
};

/// Refuses settings that write into the folder of --output if there is none.
void check_output(const Config& config, const TrainArguments& arguments) {
  require<ConfigError>(!config.train.tensorboard || !arguments.output.empty(),
                       "train.tensorboard: --output is missing, which names the folder of the "
                       "event files");
  if (arguments.profile.empty()) return;
  parse_profile_range(arguments.profile, config.train.train_iters);
  require<ConfigError>(!arguments.output.empty(),
                       "--profile: --output is missing, which names the folder of the traces");
}

void run(const TrainArguments& arguments) {
  const Config config = load_train_config(arguments);
  prepare_cuda(config);
  if (arguments.print_config) {
    std::cout << print_config(resolve_for_device(config, cuda_device_count() == 0));
    return;
  }
  check_supported(config);
  check_output(config, arguments);
  note_sigterm();
  keep_freed_memory();
  run_rounds(config, save_folder(config, arguments.output),
             [&](const Round& round) { TrainRun(round, config, arguments).run(); });
}

}  // namespace

void add_train_command(CLI::App& program) {
  auto arguments = std::make_shared<TrainArguments>();
  CLI::App* const command = program.add_subcommand("train", "Train the reference GPT");
  add_train_options(*command, *arguments);
  command->footer([] { return config_help(); });
  command->footer(kMetricsHelp);
  command->callback([arguments] { run(*arguments); });
}

}  // namespace lockstep
