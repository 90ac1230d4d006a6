#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "lockstep/core/check.h"
#include "lockstep/core/counted.h"
#include "lockstep/datasets/build_dataset.h"
#include "lockstep/datasets/dataset_summary.h"
#include "lockstep/datasets/document_reader.h"
#include "lockstep/datasets/merge_datasets.h"
#include "lockstep/program/argument_checks.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/standard_descriptors.h"

namespace lockstep {
namespace {

struct DataArguments {
  BuildDataset build;
  std::string tokenizer;
  std::vector<std::string> merged;
  std::string prefix;
  bool json = false;
};

/// On a terminal, a bar in a line that is overwritten; elsewhere nothing until the end.
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
    if (progress.skipped == 0) return;
    std::cerr << fmt::format("skipped {}{}:\n", counted(progress.skipped, "bad document"),
                             progress.skipped > static_cast<int64_t>(progress.first_bad.size())
                                 ? fmt::format(", the first {} of them", progress.first_bad.size())
                                 : "");
    for (const std::string& bad : progress.first_bad) std::cerr << "  " << bad << "\n";
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr size_t kBarLength = 20;

  struct Unit {
    double bytes;
    const char* name;
    std::string of(double count) const {
      return fmt::format("{:.{}f}", count / bytes, bytes > 1 ? 1 : 0);
    }
  };
  static Unit unit_of(double bytes) {
    return bytes < 1e3 ? Unit{1, "B"} : bytes < 1e6 ? Unit{1e3, "kB"} : Unit{1e6, "MB"};
  }

  /// "[######..............]  31 % | "; empty if the size is unknown, as for a pipe.
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
    const auto read = static_cast<double>(progress.bytes_read);
    const auto whole = static_cast<double>(progress.bytes_in_all);
    const Unit unit = unit_of(std::max(read, whole));
    const std::string share = whole > 0 ? " of " + unit.of(whole) : "";
    const double speed = seconds > 0 ? read / seconds : 0;
    const Unit speed_unit = unit_of(speed);
    return fmt::format("{} | {}{} {} | {} | {} {}/s", counted(progress.documents, "document"),
                       unit.of(read), share, unit.name, counted(progress.tokens, "token"),
                       speed_unit.of(speed), speed_unit.name);
  }

  bool terminal_ = ::isatty(STDERR_FILENO) != 0;
  Clock::time_point begin_ = Clock::now();
  Clock::time_point shown_ = begin_;
};

void build(const DataArguments& arguments) {
  for (const std::string& path : arguments.build.input)
    if (is_named_json(path) && !arguments.build.json_keys_given)
      print_note(
          fmt::format("'{}' is read as one document; files of JSON lines must end in "
                      ".jsonl",
                      path));
  BuildDisplay display;
  const std::unique_ptr<const Tokenizer> tokenizer =
      make_tokenizer(arguments.tokenizer, "--tokenizer");
  display.end(build_dataset(
      arguments.build, [&] { return tokenizer->clone(); },
      [&](const BuildProgress& progress) { display.show(progress); }));
}

void merge(const DataArguments& arguments) {
  const MergedDatasets merged = merge_datasets(arguments.merged, arguments.prefix);
  std::cerr << fmt::format("{} | {} | {} | {}\n",
                           counted(static_cast<int64_t>(arguments.merged.size()), "set"),
                           counted(merged.documents, "document"),
                           counted(merged.sequences, "sequence"), counted(merged.tokens, "token"));
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
  CLI::App* const data = program.add_subcommand("data", "Build, inspect and merge data sets");
  data->require_subcommand(1);

  CLI::App* const make = data->add_subcommand(
      "build", "Convert text files into PREFIX.bin and PREFIX.idx, in Megatron's format");
  make->add_option("--input", arguments->build.input,
                   "Text files or .jsonl files, which may be compressed as .gz or .zst. Each line "
                   "of a .jsonl is a document; any other file, a .json too, is one document. A "
                   "document has at most 2147483647 tokens")
      ->type_name("FILE")
      ->required()
      ->check(check_path);
  make->add_option(
          "--tokenizer", arguments->tokenizer,
          "byte: the ids 0 to 255 are the bytes, and 256 ends a document. gpt2:FOLDER: GPT-2's "
          "encoding; FOLDER holds encoder.json and vocab.bpe, vocab.json and merges.txt, or "
          "r50k_base.tiktoken. hf:FILE: Hugging Face's tokenizer.json. sentencepiece:FILE: a "
          "SentencePiece model; each document must fit into memory")
      ->required();
  make->add_option("--output", arguments->build.output,
                   "Prefix of the two files, which appear once they are complete")
      ->type_name("PREFIX")
      ->required()
      ->check(check_path);
  make->add_flag("--append-eod", arguments->build.append_eod,
                 "End each document with the tokenizer's end-of-document id");
  const CLI::Option* const keys =
      make->add_option("--json-keys", arguments->build.json_keys,
                       "Keys of the text in a line of a .jsonl. With several keys, as in "
                       "text,title, each makes its own data set: PREFIX_text_document, "
                       "PREFIX_title_document")
          ->type_name("KEY")
          ->delimiter(',')
          ->capture_default_str();
  make->add_option("--workers", arguments->build.workers,
                   "Number of threads that tokenize; the result does not depend on it")
      ->type_name("N")
      ->check(check_between(1, 1024))
      ->capture_default_str();
  make->add_flag(
      "--skip-bad", arguments->build.skip_bad,
      "Skip lines that are not JSON or have no text, documents of too many tokens, and the "
      "unreadable rest of a damaged compressed file. Print how many were skipped and where the "
      "first ones are");
  make->callback([arguments, keys] {
    arguments->build.json_keys_given = keys->count() > 0;
    build(*arguments);
  });

  CLI::App* const look = data->add_subcommand(
      "inspect", "Check a data set and print a summary; lengths are in tokens");
  look->add_option("PREFIX", arguments->prefix, "Prefix of PREFIX.bin and PREFIX.idx")
      ->required()
      ->check(check_path);
  look->add_flag("--json", arguments->json, "Print one JSON document");
  look->footer(
      "JSON: prefix, documents, sequences, tokens, dtype (of an id), bytes (of PREFIX.bin), "
      "min_length and max_length (of a sequence, in tokens), min_id and max_id (0 if there are no "
      "ids, or if they are not integers), modes (whether PREFIX.idx has a mode for each sequence), "
      "crc32 (of PREFIX.bin, in hexadecimal).");
  look->callback([arguments] { inspect(*arguments); });

  CLI::App* const join = data->add_subcommand(
      "merge", "Join data sets in the given order; their ids must have the same type");
  join->add_option("--input", arguments->merged, "Prefixes of the data sets")
      ->type_name("PREFIX")
      ->required()
      ->check(check_path);
  join->add_option("--output", arguments->prefix,
                   "Prefix of the two files, which appear once they are complete")
      ->type_name("PREFIX")
      ->required()
      ->check(check_path);
  join->callback([arguments] { merge(*arguments); });
}

}  // namespace lockstep
