#include <algorithm>
#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/companion_files.h"
#include "lockstep/checkpoint/saved_model.h"
#include "lockstep/checkpoint/shared_checkpoint.h"
#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/input_file.h"
#include "lockstep/core/integers.h"
#include "lockstep/core/unusable_sizes.h"
#include "lockstep/datasets/tokenizer.h"
#include "lockstep/parallel_state/announced_field.h"
#include "lockstep/parallel_state/job_secret.h"
#include "lockstep/parallel_state/launch_environment.h"
#include "lockstep/program/argument_checks.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/rank_failure.h"
#include "lockstep/training/generate.h"
#include "lockstep/training/run_setup.h"
#include "lockstep/training/stop_strings.h"

namespace lockstep {
namespace {

struct GenerateArguments {
  std::string checkpoint;
  std::vector<std::string> prompts;
  std::string input;
  std::vector<std::string> stop;
  bool json = false;
  bool ignore_eos = false;
  ParallelConfig parallel;  // its timeout is what --timeout says
  GenerateOptions options;
};

constexpr size_t kMostPrompts = 32;  // prompts that go through the model together

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const bool carriage_return = end > begin && text[end - 1] == '\r';
    lines.push_back(text.substr(begin, end - begin - (carriage_return ? 1 : 0)));
    begin = end + 1;
  }
  return lines;
}

std::string read_input(const GenerateArguments& arguments) {
  return arguments.input.empty() ? "" : read_to_end(arguments.input);
}

/// `input`: the text of the --input file.
std::vector<std::string> prompts_of(const GenerateArguments& arguments, const std::string& input) {
  std::vector<std::string> prompts = arguments.prompts;
  for (std::string& line : lines_of(input)) prompts.push_back(std::move(line));
  require<ConfigError>(!prompts.empty(),
                       "--prompt: found none, allowed: at least one, given here or in the --input "
                       "file");
  return prompts;
}

/// The model, on one rank or cut over all of them.
struct LoadedModel {
  SavedModel saved;
  ParallelState state;
};

int64_t rank_count(const ParallelConfig& parallel) {
  constexpr const char* kWhat = "ranks of --tensor, --pipeline and --expert";
  int64_t count = 0;
  refuse_unusable_sizes([&] {
    count = checked_mul(checked_mul(parallel.tensor_model_parallel_size,
                                    parallel.pipeline_model_parallel_size, kWhat),
                        parallel.expert_model_parallel_size, kWhat);
  });
  return count;
}

using TokenLists = std::vector<std::vector<int64_t>>;

/// The tokens of each prompt, at least one and all of them ids of the model.
TokenLists encode_prompts(Tokenizer& tokenizer, const std::vector<std::string>& prompts,
                          const GenerateArguments& arguments, int64_t vocab_size) {
  TokenLists tokens;
  for (const std::string& prompt : prompts) {
    tokens.push_back(tokenizer.encode(prompt));
    const std::string problem =
        problem_of_prompt(tokens.back(), vocab_size, fmt::format(" in '{}'", prompt));
    if (problem.empty()) continue;
    const auto line = static_cast<int64_t>(tokens.size() - arguments.prompts.size());
    require<ConfigError>(line > 0, "--prompt: {}", problem);
    fail<FileError>("'{}': line {}: {}", arguments.input, line, problem);
  }
  return tokens;
}

/// Continues prompts together; `on_text` gets the new text of each, piece by piece.
void continue_prompts(const LoadedModel& model, const Tokenizer& tokenizer,
                      const TokenLists& prompts, const GenerateArguments& arguments,
                      const StopStrings& stop,
                      const std::function<void(size_t, const std::string&)>& on_text) {
  GenerateOptions options = arguments.options;
  options.vocabulary_size = tokenizer.vocabulary_size();
  if (!arguments.ignore_eos) options.ends = ends_of_text(model.saved.config, tokenizer);
  std::vector<StopStrings> stops(prompts.size(), stop);
  const auto listener = [&](size_t i, int64_t token) {
    on_text(i, stops[i].add(tokenizer.decode_more({token})));
    return !stops[i].found();
  };
  generate_batch(*model.saved.model, prompts, options, listener, model.state);
  for (size_t i = 0; i < prompts.size(); ++i) on_text(i, stops[i].rest());
}

void print_texts(const GenerateArguments& arguments, const std::vector<std::string>& prompts,
                 const std::vector<std::string>& texts) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (size_t i = 0; i < prompts.size(); ++i)
    if (arguments.json)
      json.push_back({{"prompt", prompts[i]}, {"text", texts[i]}});
    else
      std::cout << prompts[i] << texts[i] << '\n';
  if (arguments.json)
    std::cout << json.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace)
              << '\n';
  std::cout << std::flush;
}

void write_texts(const GenerateArguments& arguments, const std::vector<std::string>& prompts,
                 const StopStrings& stop, const LoadedModel& model) {
  const bool tells = model.state.rank() == 0;
  const auto tokenizer = make_tokenizer(model.saved.config.data.tokenizer, "data.tokenizer");
  const TokenLists tokens =
      encode_prompts(*tokenizer, prompts, arguments, model.saved.config.model.vocab_size);
  if (prompts.size() == 1 && !arguments.json) {
    const auto tell = [tells](const std::string& text) {
      if (tells) std::cout << text << std::flush;
    };
    tell(prompts.front());
    continue_prompts(model, *tokenizer, tokens, arguments, stop,
                     [&](size_t, const std::string& text) { tell(text); });
    return tell("\n");
  }
  std::vector<std::string> texts(prompts.size());
  for (size_t first = 0; first < prompts.size(); first += kMostPrompts) {
    const auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(first);
    const size_t count = std::min(kMostPrompts, prompts.size() - first);
    continue_prompts(model, *tokenizer, {begin, begin + static_cast<std::ptrdiff_t>(count)},
                     arguments, stop,
                     [&](size_t i, const std::string& text) { texts[first + i] += text; });
  }
  if (tells) print_texts(arguments, prompts, texts);
}

std::string json_of(const std::vector<std::string>& texts) {
  return nlohmann::json(texts).dump(-1, ' ', /*ensure_ascii=*/true,
                                    nlohmann::json::error_handler_t::replace);
}

/// What, beside the configuration, must be the same on all ranks: they draw the same tokens.
std::vector<AnnouncedField> announced(const GenerateArguments& arguments) {
  const GenerateOptions& options = arguments.options;
  return {{"--prompt", json_of(arguments.prompts)},
          {"--stop", json_of(arguments.stop)},
          {"--ignore-eos", arguments.ignore_eos ? "given" : "not given"},
          {"--max-tokens", std::to_string(options.max_tokens)},
          {"--temperature", fmt::format("{}", options.temperature)},
          {"--top-k", std::to_string(options.top_k)},
          {"--top-p", fmt::format("{}", options.top_p)},
          {"--seed", std::to_string(options.seed)}};
}

/// `config` of a run with the layout of the options. Without --timeout the ranks wait as long as
/// those of the run did, but not less than the default: a run with short steps may have a short
/// timeout, and here a stage waits while all prompts go through those before it.
Config with_layout(Config config, const ParallelConfig& layout, bool is_cpu) {
  const double of_run = config.parallel.distributed_timeout_seconds.value_or(0);
  config.parallel = layout;
  config = resolve_for_device(config, is_cpu);
  auto& timeout = config.parallel.distributed_timeout_seconds;
  if (!layout.distributed_timeout_seconds) timeout = std::max(*timeout, of_run);
  return config;
}

/// Runs as one of the ranks that a launcher started; the first of them reads --input, which may be
/// a pipe that all of them have, and writes.
void run_as_rank(const GenerateArguments& arguments, const StopStrings& stop) {
  const LaunchEnvironment environment = read_launch_environment();
  if (environment.rank == 0) note_doubt(arguments.checkpoint);
  require<ConfigError>(rank_count(arguments.parallel) == environment.world_size,
                       "--tensor, --pipeline, --expert: found a product of {}, allowed: {}, the "
                       "number of ranks started",
                       rank_count(arguments.parallel), environment.world_size);
  std::optional<ParallelState> state;
  try {
    const c10::Device device = choose_device(DeviceChoice::auto_, environment);
    const Config config = with_layout(CheckpointReader(arguments.checkpoint).config(),
                                      arguments.parallel, device.is_cpu());
    ParallelStateOptions options = parallel_options(config, device);
    for (AnnouncedField& field : announced(arguments))
      options.announcement.push_back(std::move(field));
    state.emplace(environment, std::move(options));
    const auto find = [&] { return read_input(arguments); };
    const std::string input = as_rank_0_finds(*state, find, "prompts of --input");
    const std::vector<std::string> prompts = prompts_of(arguments, input);
    write_texts(arguments, prompts, stop,
                {load_model(arguments.checkpoint, config.parallel, *state), *state});
  } catch (const std::exception& error) {
    if (state) state->post_failure(error.what());
    throw failure_of_rank(environment.rank, error);
  }
}

void run(const GenerateArguments& arguments) {
  const StopStrings stop(arguments.stop);
  if (rank_count(arguments.parallel) > 1 || read_launch_environment().world_size > 1)
    return run_as_rank(arguments, stop);
  (void)read_job_secret();  // one rank alone refuses what several refuse when they meet
  const std::vector<std::string> prompts = prompts_of(arguments, read_input(arguments));
  note_doubt(arguments.checkpoint);
  const c10::Device device = choose_device(DeviceChoice::auto_, LaunchEnvironment{});
  write_texts(arguments, prompts, stop,
              {load_model(arguments.checkpoint, device), ParallelState::single_process()});
}

void add_layout_options(CLI::App& command, ParallelConfig& parallel) {
  const auto add = [&command](const char* name, int64_t& size, const char* what) {
    command
        .add_option(
            name, size,
            fmt::format("Number of ranks over which {} are split. Start as many ranks as the "
                        "product of --tensor, --pipeline and --expert",
                        what))
        ->capture_default_str()
        ->check(check_at_least(1));
  };
  add("--tensor", parallel.tensor_model_parallel_size, "the matrices of a layer");
  add("--pipeline", parallel.pipeline_model_parallel_size, "the layers");
  add("--expert", parallel.expert_model_parallel_size, "the experts");
  command
      .add_option(
          "--timeout", parallel.distributed_timeout_seconds,
          "Seconds after which ranks that wait for each other fail. With --pipeline, a stage "
          "waits until all prompts have passed the earlier stages. Default: "
          "parallel.distributed_timeout_seconds of the run that saved, at least 600 on a "
          "GPU and 60 on the CPU")
      ->type_name("SECONDS")
      ->check(check_timeout);
}

/// Takes texts as they are given: CLI11 by itself reads {} as no text.
void add_texts(CLI::App& command, const std::string& name, std::vector<std::string>& texts,
               const std::string& meaning) {
  const auto take = [&command, &texts, name](const CLI::results_t& /*changed*/) {
    texts = command.get_option(name)->results();
    return true;
  };
  command.add_option(name, take, meaning)
      ->type_name("TEXT")
      ->expected(1, CLI::detail::expected_max_vector_size)
      ->allow_extra_args(false)
      ->take_all();
}

void add_sampling_options(CLI::App& command, GenerateOptions& options) {
  command
      .add_option(
          "--max-tokens", options.max_tokens,
          "Maximum number of tokens to generate; an end-of-document token ends a text earlier")
      ->capture_default_str()
      ->check(check_at_least(0));
  command
      .add_option("--temperature", options.temperature,
                  "Sampling temperature, which divides the logits; 0 always takes the most likely "
                  "token")
      ->capture_default_str()
      ->check(check_not_negative);
  command
      .add_option("--top-k", options.top_k,
                  "Sample from this many of the most likely tokens; 0: from all tokens")
      ->capture_default_str()
      ->check(check_at_least(0));
  command
      .add_option(
          "--top-p", options.top_p,
          "Among these, sample from the smallest set of most likely tokens whose probabilities "
          "add up to this")
      ->capture_default_str()
      ->check(check_probability);
  command
      .add_option(
          "--seed", options.seed,
          fmt::format("Seed of the sampling, from 0 to {}; the same seed gives the same text",
                      kLargestSeed))
      ->capture_default_str()
      ->check(check_seed);
}

}  // namespace

void add_generate_command(CLI::App& program) {
  auto arguments = std::make_shared<GenerateArguments>();
  CLI::App* const command =
      program.add_subcommand("generate", "Continue texts with a model that `train` saved");
  command
      ->add_option("CHECKPOINT", arguments->checkpoint,
                   "Folder of checkpoint.save, whose newest complete checkpoint is used, or "
                   "the folder of one checkpoint")
      ->required()
      ->check(check_path);
  add_texts(*command, "--prompt", arguments->prompts,
            "Start of the text; may be repeated. Several prompts run through the model together, "
            "and each gets the same text as it would alone");
  command
      ->add_option("--input", arguments->input,
                   "File with one prompt on each line. The first of several ranks reads it")
      ->type_name("FILE");
  add_texts(*command, "--stop", arguments->stop,
            "Stop generating at this string, which is not printed; may be repeated: the "
            "first one to appear ends the text");
  command->add_flag("--ignore-eos", arguments->ignore_eos,
                    "Continue after an end-of-document token instead of ending the text there");
  command->add_flag("--json", arguments->json,
                    "Print one JSON document: a list with \"prompt\" and \"text\" for each");
  add_sampling_options(*command, arguments->options);
  add_layout_options(*command, arguments->parallel);
  command->callback([arguments] { run(*arguments); });
}

}  // namespace lockstep
