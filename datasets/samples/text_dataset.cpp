#include "lockstep/datasets/text_dataset.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <new>
#include <optional>

#include "lockstep/core/check.h"
#include "lockstep/core/config_rules.h"
#include "lockstep/core/input_file.h"
#include "lockstep/core/philox.h"
#include "lockstep/datasets/compressed_input.h"
#include "lockstep/datasets/indexed_dataset.h"
#include "lockstep/datasets/sample_marks.h"
#include "lockstep/datasets/tokenizer.h"

namespace lockstep {
namespace {

/// The tokens of one path of data.path.
struct Source {
  std::shared_ptr<const void> owner;
  PackedTokens tokens;
  std::string path;
  bool has_end = false;  ///< of a document, in a text file; looked for if asked
};

Source tokens_of_dataset(const std::string& prefix, const std::string& field) {
  const auto dataset = std::make_shared<const IndexedDataset>(prefix);
  require<FileError>(dataset->tokens().size > 0, "{}: '{}.bin' is empty", field, prefix);
  return {dataset, dataset->tokens(), prefix + ".bin"};
}

/// The folder in which a relative path was looked for, and the kinds of paths that are allowed.
std::string place_of(const std::string& path, const std::string& field) {
  std::error_code error;
  const auto folder = std::filesystem::current_path(error);
  const bool relative = std::filesystem::path(path).is_relative() && !error;
  return (relative ? fmt::format(" (in the working folder {})", folder.string()) : "") +
         "; allowed: plain text files, and prefixes of data sets that `lockstep data build` "
         "writes" +
         (field == "data.path" ? ", as in --set data.path=FILE" : "");
}

std::string decompress_all(InputFile& file) {
  constexpr size_t kAtOnce = 1 << 20;
  CompressedInput input(
      compression_of(file.path()), [&file](char* to, size_t count) { return file.read(to, count); },
      file.path());
  std::string text;
  for (size_t got = 1; got > 0;) {
    const size_t end = text.size();
    text.resize(end + kAtOnce);
    got = input.read(text.data() + end, kAtOnce);
    text.resize(end + got);
  }
  return text;
}

std::string read_text_file(const std::string& path, const std::string& field) {
  std::string text;
  try {
    InputFile file(path, {.kinds = InputKinds::regular_or_pipe});
    const bool compressed = compression_of(path) != Compression::none;
    text = compressed ? decompress_all(file) : read_all(file);
  } catch (const CompressionError& error) {
    fail<FileError>("{}: {}", field, error.what());
  } catch (const std::bad_alloc&) {
    fail<FileError>("{}: '{}' cannot be read: its text does not fit into the memory", field, path);
  } catch (const FileError& error) {
    fail<FileError>("{}: {}{}", field, error.what(), place_of(path, field));
  }
  require<FileError>(!text.empty(), "{}: '{}' is empty", field, path);
  return text;
}

void refuse_json_lines(const std::string& path, const std::string& field) {
  require<ConfigError>(
      !without_compression(path).ends_with(".jsonl"),
      "{}: found '{}', a file of JSON lines; allowed: the prefix of a data set "
      "that `lockstep data build` makes of it{}",
      field, path, field.starts_with("data.") ? ", or conversations with train.task = sft" : "");
}

void refuse_file_of_dataset(const std::string& path, const std::string& field) {
  const bool part = path.ends_with(".idx") || path.ends_with(".bin");
  const std::string prefix = part ? path.substr(0, path.size() - 4) : "";
  require<ConfigError>(!part || !is_dataset_prefix(prefix),
                       "{}: found '{}', a file of the data set '{}'; allowed: that prefix", field,
                       path, prefix);
}

/// Looks for the id `end`, if it is given.
Source tokenize_file(const std::string& path, Tokenizer& tokenizer, const std::string& field,
                     std::optional<int64_t> end) {
  constexpr size_t kAtOnce = 1 << 20;  // each id takes 8 bytes for a moment
  const std::string text = read_text_file(path, field);
  const TokenType type = token_type_of_vocabulary(tokenizer.vocabulary_size());
  auto packed = std::make_shared<std::string>();
  std::vector<int64_t> ids;
  size_t length = kAtOnce;
  bool has_end = false;
  for (std::string_view left = text; !left.empty();) {
    const std::string_view front = left.substr(0, length);
    ids.clear();
    const size_t used = tokenizer.encode_front(front, front.size() == left.size(), ids);
    has_end = has_end || (end && std::find(ids.begin(), ids.end(), *end) != ids.end());
    pack_tokens(ids, type, *packed);
    left.remove_prefix(used);
    length = used > 0 ? kAtOnce : 2 * length;
  }
  const auto size = static_cast<int64_t>(packed->size()) / token_type_bytes(type);
  return {packed, {packed->data(), type, size}, path, has_end};
}

}  // namespace

TextSplit read_text(const DataConfig& config, int64_t vocabulary_size, const std::string& field) {
  require<ConfigError>(!config.path.empty(),
                       "{}: is not set, allowed: plain text files, and prefixes of data sets that "
                       "`lockstep data build` writes",
                       field);
  const std::vector<double> shares = parse_split(split_of(config));
  const std::string largest = "model.vocab_size - 1";
  TextSplit split{TokenSequence(vocabulary_size, largest), TokenSequence(vocabulary_size, largest)};
  std::unique_ptr<Tokenizer> tokenizer;
  std::optional<int64_t> document_end;
  for (const std::string& path : config.path) {
    const bool dataset = is_dataset_prefix(path);
    if (!dataset) {
      refuse_json_lines(path, field);
      refuse_file_of_dataset(path, field);
    }
    if (!dataset && !tokenizer) {
      tokenizer = make_tokenizer(config.tokenizer, "data.tokenizer");
      if (marks_documents(config)) document_end = tokenizer->end_of_document();
    }
    const Source source = dataset ? tokens_of_dataset(path, field)
                                  : tokenize_file(path, *tokenizer, field, document_end);
    if (!dataset && document_end && !source.has_end && split.endless.empty()) split.endless = path;
    const auto cut = [size = source.tokens.size](double share) {
      return std::min<int64_t>(std::llround(share * static_cast<double>(size)), size);
    };
    const auto add = [&](TokenSequence& to, int64_t begin, int64_t end) {
      to.append(source.owner, source.tokens.part(begin, end), source.path, begin);
    };
    const int64_t training = cut(shares[0]), validation = cut(shares[0] + shares[1]);
    add(split.training, 0, training);
    add(split.validation, training, validation);
  }
  return split;
}

SampleOrder::SampleOrder(int64_t num_tokens, int64_t seq_length, uint64_t seed)
    : seq_length_(seq_length), seed_(seed) {
  require<ConfigError>(num_tokens > seq_length,
                       "data.path: the training text has {} tokens, allowed: more than "
                       "model.seq_length ({})",
                       num_tokens, seq_length);
  // One window less than fits leaves room for any start within a window.
  windows_ = std::max<int64_t>((num_tokens - seq_length) / seq_length, 1);
  shifts_ = std::min(num_tokens - windows_ * seq_length, seq_length);
}

int64_t SampleOrder::start_of(int64_t sample) const {
  const int64_t epoch = sample / windows_, index = sample % windows_;
  const std::string name = fmt::format("samples of epoch {}", epoch);
  const Permutation order(static_cast<uint64_t>(windows_), seed_, name);
  const auto window = static_cast<int64_t>(order(static_cast<uint64_t>(index)));
  const auto shift = static_cast<int64_t>(CounterStream(seed_, name + ", start").bits(0) %
                                          static_cast<uint64_t>(shifts_));
  return shift + window * seq_length_;
}

int64_t evaluation_windows(int64_t num_tokens, int64_t seq_length) {
  return num_tokens > 0 ? (num_tokens - 1) / seq_length : 0;
}

}  // namespace lockstep
