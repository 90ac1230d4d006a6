#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "lockstep/core/check.h"
#include "lockstep/datasets/build_dataset.h"
#include "lockstep/program/argument_checks.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/standard_descriptors.h"

namespace lockstep {
namespace {

struct DataArguments {
  BuildDataset build;
  std::string tokenizer;
  std::string prefix;
  bool json = false;
};

/// On a terminal a bar in a line that is written over, elsewhere nothing until the end.
class BuildDisplay {
 public:
  void show(const BuildProgress& progress) {
    if (!terminal_) return;
    const auto now = Clock::now();
    if (now - shown_ < std::chrono::milliseconds(100)) return;
    shown_ = now;
    std::cerr << "\r\x1b[K" << bar(progress) << line(progress) << std::flush;
  }

  void end(const BuildProgress& progress) {
    std::cerr << (terminal_ ? "\r\x1b[K" : "") << line(progress) << std::endl;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kBarLength = 20;

  /// "[######..............]  31 % | "; nothing where the size is not known, as of a pipe.
  static std::string bar(const BuildProgress& progress) {
    if (progress.bytes_in_all == 0) return "";
    const double share = std::min(
        static_cast<double>(progress.bytes_read) / static_cast<double>(progress.bytes_in_all), 1.0);
    const auto full = static_cast<size_t>(share * kBarLength);
    return fmt::format("[{}{}] {:3.0f} % | ", std::string(full, '#'),
                       std::string(kBarLength - full, '.'), share * 100);
  }

  std::string line(const BuildProgress& progress) const {
    const double seconds = std::chrono::duration<double>(Clock::now() - begin_).count();
    const auto megabytes = [](int64_t bytes) { return static_cast<double>(bytes) / 1e6; };
    const double speed = seconds > 0 ? megabytes(progress.bytes_read) / seconds : 0;
    return fmt::format("{} documents | {:.1f} of {:.1f} MB | {} tokens | {:.1f} MB/s",
                       progress.documents, megabytes(progress.bytes_read),
                       megabytes(progress.bytes_in_all), progress.tokens, speed);
  }

  bool terminal_ = ::isatty(STDERR_FILENO) != 0;
  Clock::time_point begin_ = Clock::now();
  Clock::time_point shown_ = begin_;
};

void build(const DataArguments& arguments) {
  const auto tokenizer = make_tokenizer(arguments.tokenizer, "--tokenizer");
  BuildDisplay display;
  display.end(build_dataset(arguments.build, *tokenizer,
                            [&](const BuildProgress& progress) { display.show(progress); }));
}

void inspect(const DataArguments& arguments) {
  const IndexedDataset dataset(arguments.prefix);
  const DatasetIndex& index = dataset.index();
  const DatasetSummary summary = summarize(dataset);
  nlohmann::ordered_json json = {
      {"prefix", arguments.prefix},           {"documents", index.num_documents()},
      {"sequences", index.num_sequences()},   {"tokens", index.num_tokens},
      {"dtype", token_type_name(index.type)}, {"bytes", index.bin_bytes()},
      {"min_length", summary.shortest},       {"max_length", summary.longest},
      {"min_id", summary.smallest_id},        {"max_id", summary.largest_id},
      {"modes", index.modes.size() > 0},      {"crc32", fmt::format("{:08x}", summary.crc32)}};
  if (arguments.json) {
    std::cout << json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << "\n";
  } else {
    for (const auto& [name, value] : json.items())
      std::cout << fmt::format("{:<12}{}\n", name,
                               value.is_string() ? value.get<std::string>() : value.dump());
  }
  flush_standard_output("data inspect");
}

}  // namespace

void add_data_command(CLI::App& program) {
  auto arguments = std::make_shared<DataArguments>();
  CLI::App* const data = program.add_subcommand("data", "Build and inspect data sets");
  data->require_subcommand(1);

  CLI::App* const make = data->add_subcommand(
      "build", "Convert text files into PREFIX.bin and PREFIX.idx, in Megatron's format");
  make->add_option("--input", arguments->build.input, "Text files; each file is one document")
      ->type_name("FILE")
      ->required();
  make->add_option(
          "--tokenizer", arguments->tokenizer,
          "byte: the ids 0 to 255 are the bytes, and 256 ends a document. gpt2:FOLDER: GPT-2's "
          "encoding; FOLDER holds encoder.json and vocab.bpe, vocab.json and merges.txt, or "
          "r50k_base.tiktoken. hf:FILE: Hugging Face's tokenizer.json. sentencepiece:FILE: a "
          "SentencePiece model, which takes each "
          "document into memory")
      ->required();
  make->add_option("--output", arguments->build.output,
                   "Prefix of the two files, which appear once they are complete")
      ->type_name("PREFIX")
      ->required()
      ->check(check_path);
  make->add_flag("--append-eod", arguments->build.append_eod,
                 "End each document with the tokenizer's end-of-document id");
  make->callback([arguments] { build(*arguments); });

  CLI::App* const look = data->add_subcommand(
      "inspect", "Check a data set and print what it holds; lengths are in tokens");
  look->add_option("PREFIX", arguments->prefix, "Prefix of PREFIX.bin and PREFIX.idx")->required();
  look->add_flag("--json", arguments->json, "Print one JSON document");
  look->callback([arguments] { inspect(*arguments); });
}

}  // namespace lockstep
