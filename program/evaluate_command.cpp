#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/saved_model.h"
#include "lockstep/core/check.h"
#include "lockstep/core/counted.h"
#include "lockstep/datasets/text_dataset.h"
#include "lockstep/datasets/token_batch.h"
#include "lockstep/parallel_state/launch_environment.h"
#include "lockstep/program/argument_checks.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/one_process.h"
#include "lockstep/training/run_setup.h"
#include "lockstep/training/score.h"

namespace lockstep {
namespace {

struct EvaluateArguments {
  std::string checkpoint;
  std::string input;
  bool json = false;
};

constexpr int64_t kBatchTokens = 16384;

TokenSequence read_input(const EvaluateArguments& arguments, const Config& config) {
  DataConfig data;
  data.path = {arguments.input};
  data.tokenizer = config.data.tokenizer;
  data.split = "1,0";
  TokenSequence text = read_text(data, config.model.vocab_size, "--input").training;
  require<FileError>(evaluation_windows(text.size(), config.model.seq_length) > 0,
                     "--input: '{}' has {} tokens, allowed: more than model.seq_length ({})",
                     arguments.input, text.size(), config.model.seq_length);
  return text;
}

/// Says how the loss differs from those of the run that saved the checkpoint; empty: it does not.
std::string note_on_documents(const DataConfig& data) {
  std::vector<std::string> fields;
  if (data.reset_position_ids) fields.push_back("data.reset_position_ids");
  if (data.reset_attention_mask) fields.push_back("data.reset_attention_mask");
  if (data.eod_mask_loss) fields.push_back("data.eod_mask_loss");
  if (fields.empty()) return "";
  return fmt::format(
      "the checkpoint's run set {}, but evaluate ignores where documents end: positions count from "
      "the start of a window, each token sees all tokens before it, and all count in the loss. The "
      "result cannot be compared with validation_loss and test_loss of the run",
      fmt::join(fields, ", "));
}

void run(const EvaluateArguments& arguments) {
  require_one_process("evaluate");
  const at::NoGradGuard no_grad;
  const c10::Device device = choose_device(DeviceChoice::auto_, LaunchEnvironment{});
  note_doubt(arguments.checkpoint);
  const SavedModel saved =
      load_model(arguments.checkpoint, device, LogitsLimit{kMostLogits, kBatchTokens});
  const TokenSequence text = read_input(arguments, saved.config);
  print_note(note_on_documents(saved.config.data));
  const int64_t length = saved.config.model.seq_length;
  const int64_t windows = evaluation_windows(text.size(), length);
  const int64_t batch_size = std::max<int64_t>(1, kBatchTokens / length);
  double sum = 0;
  for (int64_t first = 0; first < windows; first += batch_size) {
    std::vector<int64_t> starts;
    for (int64_t w = first; w < std::min(first + batch_size, windows); ++w)
      starts.push_back(w * length);
    const TokenBatch batch = make_token_batch(text, starts, length, device);
    sum += saved.model->forward(batch.tokens, batch.labels).sum(at::kDouble).item<double>();
  }
  const int64_t tokens = windows * length;
  const double loss = sum / static_cast<double>(tokens);
  require<FileError>(std::isfinite(loss), "'{}': the loss on '{}' is not a finite number",
                     saved.path, arguments.input);
  const double perplexity = std::min(std::exp(loss), std::numeric_limits<double>::max());
  const nlohmann::ordered_json json = {
      {"loss", loss}, {"perplexity", perplexity}, {"tokens", tokens}};
  if (arguments.json)
    std::cout << json.dump() << std::endl;
  else
    std::cout << fmt::format("loss {:.6f} | perplexity {:.4f} | {}", loss, std::exp(loss),
                             counted(tokens, "token"))
              << std::endl;
}

}  // namespace

void add_evaluate_command(CLI::App& program) {
  auto arguments = std::make_shared<EvaluateArguments>();
  CLI::App* const command = program.add_subcommand(
      "evaluate", "Compute the mean loss of a checkpoint's model on a text, in nats per token");
  command
      ->add_option("CHECKPOINT", arguments->checkpoint,
                   "Folder of checkpoint.save, whose newest complete checkpoint is used, or "
                   "the folder of one checkpoint")
      ->required()
      ->check(check_path);
  command
      ->add_option("--input", arguments->input,
                   "Text file, which may be compressed as .gz or .zst, or prefix of a data set. "
                   "With S = model.seq_length, window i reads the tokens i*S to i*S+S-1 and "
                   "predicts the token after each. A partial last window is dropped")
      ->type_name("FILE")
      ->required()
      ->check(check_path);
  command->add_flag("--json", arguments->json, "Print one JSON document");
  command->footer(
      "Experts take all their tokens: model.moe_expert_capacity_factor applies to training and its "
      "validations only.\n"
      "Windows ignore document boundaries. If the run that saved set data.reset_position_ids, "
      "data.reset_attention_mask or data.eod_mask_loss, they have no effect, and a note says so.\n"
      "JSON: loss (nats, mean over the predicted tokens), perplexity (its exponential, at most the "
      "largest double), tokens (how many were predicted).");
  command->callback([arguments] { run(*arguments); });
}

}  // namespace lockstep
