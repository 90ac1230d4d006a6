#include <iostream>
#include <memory>

#include "lockstep/checkpoint/saved_model.h"
#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/datasets/tokenizer.h"
#include "lockstep/parallel_state/launch_environment.h"
#include "lockstep/program/argument_checks.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/one_process.h"
#include "lockstep/training/run_setup.h"
#include "lockstep/training/score.h"

namespace lockstep {
namespace {

struct ScoreArguments {
  std::string checkpoint;
  std::string input;
};

void run_score(const ScoreArguments& arguments) {
  require_one_process("score");
  const std::string text = read_to_end(arguments.input);
  const auto requests = parse_score_requests(text, arguments.input);
  note_doubt(arguments.checkpoint);
  const SavedModel saved =
      load_model(arguments.checkpoint, choose_device(DeviceChoice::auto_, LaunchEnvironment{}));
  const TransformerConfig& model = saved.config.model;
  const auto tokenizer = make_tokenizer(saved.config.data.tokenizer, "data.tokenizer");
  std::vector<ScoreTokens> tokens;
  for (const ScoreRequest& request : requests) try {
      tokens.push_back(
          encode_score_request(request, *tokenizer, model.seq_length, model.vocab_size));
    } catch (const ConfigError& error) {
      fail<FileError>("'{}': line {}: {}", arguments.input, request.line_number, error.what());
    }
  const std::vector<Score> scores = score(*saved.model, tokens);
  for (size_t i = 0; i < scores.size(); ++i)
    std::cout << format_score(requests[i], scores[i].logprob, scores[i].is_greedy) << '\n';
  std::cout << std::flush;
}

}  // namespace

void add_score_command(CLI::App& program) {
  auto arguments = std::make_shared<ScoreArguments>();
  CLI::App* const command = program.add_subcommand(
      "score", "Compute the likelihood of given continuations under a checkpoint's model");
  command
      ->add_option("CHECKPOINT", arguments->checkpoint,
                   "Folder of checkpoint.save, whose newest complete checkpoint is used, or "
                   "the folder of one checkpoint")
      ->required()
      ->check(check_path);
  command
      ->add_option(
          "--input", arguments->input,
          "File with one JSON object on each line, with the texts \"context\" and "
          "\"continuation\". Each line is printed with two fields added: \"logprob\", the "
          "log-likelihood of the continuation in nats, and \"is_greedy\", whether the model would "
          "generate the continuation greedily. Blank lines are skipped. An empty context stands "
          "for the token that begins texts, or the end-of-document token of a tokenizer without "
          "one. An empty continuation has log-likelihood 0. If a text or a continuation has more "
          "than model.seq_length tokens, only its end counts")
      ->type_name("FILE")
      ->required()
      ->check(check_path);
  command->callback([arguments] { run_score(*arguments); });
}

}  // namespace lockstep
