#include "lockstep/datasets/build_dataset.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>

#include "lockstep/core/check.h"
#include "lockstep/core/counted.h"
#include "lockstep/core/input_file.h"
#include "lockstep/datasets/document_batch.h"
#include "lockstep/datasets/document_reader.h"
#include "lockstep/datasets/indexed_dataset_writer.h"
#include "lockstep/datasets/ordered_workers.h"

namespace lockstep {
namespace {

using MakeTokenizer = std::function<std::unique_ptr<Tokenizer>()>;

constexpr size_t kBatchBytes = 1 << 18;
constexpr size_t kToldBadDocuments = 5;

int64_t bytes_of_files(const std::vector<std::string>& paths) {
  int64_t sum = 0;
  for (const std::string& path : paths) sum += size_of_file(path);
  return sum;
}

/// Refuses keys that the user has given for a text.
void check_json_lines(const BuildDataset& build) {
  const std::vector<std::string>& input = build.input;
  const bool has_lines = std::any_of(input.begin(), input.end(), [](const std::string& path) {
    return form_of_input(path) == InputForm::json_lines;
  });
  const auto named_json = std::find_if(input.begin(), input.end(), is_named_json);
  const auto text = has_lines || named_json != input.end() ? named_json : input.begin();
  if (text == input.end()) return;
  fail<ConfigError>(
      "--json-keys: found '{}', and the input '{}', which is read as one text; allowed: files of "
      "JSON lines, named .jsonl, .jsonl.gz or .jsonl.zst",
      fmt::join(build.json_keys, ","), *text);
}

void check_json_keys(const BuildDataset& build) {
  const auto& keys = build.json_keys;
  const auto check = [&](bool good, std::string_view allowed) {
    require<ConfigError>(good, "--json-keys: found '{}', allowed: {}", fmt::join(keys, ","),
                         allowed);
  };
  const std::set<std::string> different(keys.begin(), keys.end());
  check(!keys.empty() && different.size() == keys.size() && !different.contains(""),
        "one or more keys, each once, none of them empty");
  if (build.json_keys_given) check_json_lines(build);
  if (keys.size() == 1) return;
  for (const std::string& key : keys)
    check(key.find('/') == std::string::npos,
          "several keys without '/', because they are parts of the outputs' names");
  for (const std::string& path : build.input)
    check(form_of_input(path) == InputForm::json_lines,
          fmt::format("one key, because '{}' is a text and has one output", path));
}

std::vector<std::string> output_prefixes(const BuildDataset& build) {
  if (build.json_keys.size() == 1) return {build.output};
  std::vector<std::string> prefixes;
  for (const std::string& key : build.json_keys)
    prefixes.push_back(build.output + "_" + key + "_document");
  return prefixes;
}

/// Refuses outputs that would replace an input.
void check_outputs(const BuildDataset& build) {
  for (const std::string& prefix : output_prefixes(build))
    for (const char* suffix : {".bin", ".idx"})
      for (const std::string& input : build.input) {
        std::error_code none;
        if (!std::filesystem::exists(prefix + suffix, none)) continue;
        require<ConfigError>(
            !std::filesystem::equivalent(prefix + suffix, input, none),
            "--output: found '{}', whose '{}{}' is an input, allowed: another prefix", build.output,
            prefix, suffix);
      }
}

/// Writes one data set for each output.
class DatasetSink : public DocumentSink {
 public:
  DatasetSink(const std::vector<std::string>& prefixes, TokenType type) : type_(type) {
    for (const std::string& prefix : prefixes)
      writers_.push_back(std::make_unique<IndexedDatasetWriter>(prefix, type));
  }

  void append(size_t output, std::span<const int64_t> ids) override {
    writers_[output]->append(ids);
  }
  void drop(size_t output) override { writers_[output]->drop_sequence(); }
  void end(size_t output, bool with_sequence) override {
    if (with_sequence) writers_[output]->end_sequence();
    writers_[output]->end_document();
  }

  void write(const EncodedBatch& batch) {
    for (size_t output = 0; output < writers_.size(); ++output) {
      std::string_view packed = batch.outputs[output].packed;
      for (const int64_t length : batch.outputs[output].lengths) {
        const bool with_sequence = length != EncodedBatch::kNoSequence;
        const auto bytes =
            static_cast<size_t>((with_sequence ? length : 0) * token_type_bytes(type_));
        writers_[output]->append_packed(packed.substr(0, bytes));
        packed.remove_prefix(bytes);
        end(output, with_sequence);
      }
    }
  }

  void finish() {
    for (const auto& writer : writers_) writer->prepare();
    for (const auto& writer : writers_) writer->publish();
  }

 private:
  TokenType type_;
  std::vector<std::unique_ptr<IndexedDatasetWriter>> writers_;
};

/// Short documents go to the workers in batches. A document that is longer than a piece is encoded
/// as it is read, after all documents before it were written.
class DatasetBuilder {
 public:
  DatasetBuilder(const BuildDataset& build, const MakeTokenizer& make,
                 const std::function<void(const BuildProgress&)>& tell)
      : build_(build),
        tell_(tell),
        tokenizer_(make()),
        options_{.encoder = {.keys = build.json_keys, .append_eod = build.append_eod},
                 .type = token_type_of_vocabulary(tokenizer_->vocabulary_size()),
                 .skip_bad = build.skip_bad,
                 .inputs = build.input},
        done_{.bytes_in_all = bytes_of_files(build.input)},
        sink_(output_prefixes(build), options_.type),
        encoder_(options_.encoder, *tokenizer_, sink_),
        workers_(build.workers > 1 ? static_cast<size_t>(build.workers) : 0,
                 [this, make] { return work_of_thread(make); }) {}

  BuildProgress run() {
    for (size_t input = 0; input < build_.input.size(); ++input) read(input);
    drain();
    require<FileError>(done_.tokens > 0, "'{}' {}; allowed: files with text{}",
                       fmt::join(build_.input, "', '"),
                       done_.bytes_read > 0 ? "has no text" : "is empty", after_skipping());
    sink_.finish();
    tell_(done_);
    return done_;
  }

 private:
  using Workers = OrderedWorkers<DocumentBatch, EncodedBatch>;

  Workers::Work work_of_thread(const MakeTokenizer& make) const {
    return [this, tokenizer = std::shared_ptr<Tokenizer>(make())](const DocumentBatch& batch) {
      return encode_batch(batch, options_, *tokenizer);
    };
  }

  void read(size_t input) {
    DocumentReader reader(build_.input[input]);
    const int64_t before = done_.bytes_read;
    const bool json = reader.form() == InputForm::json_lines;
    bool inside = false;
    try {
      for (DocumentReader::Piece piece; reader.next(piece);) {
        if (piece.begins && piece.ends)
          add({.size = piece.bytes.size(),
               .form = reader.form(),
               .input = input,
               .line = json ? piece.line : 0},
              piece.bytes);
        else
          encode_part(piece, reader.form(), input);
        inside = !piece.ends;
        done_.bytes_read = before + reader.bytes_read();
      }
    } catch (const CompressionError& error) {
      if (inside) encoder_.abandon_document();
      drain();
      note_bad({build_.input[input], json ? reader.line() : 0, error.problem()});
    }
    done_.bytes_read = before + reader.bytes_read();
  }

  void add(DocumentBatch::Document document, std::string_view bytes) {
    document.begin = batch_.bytes.size();
    batch_.bytes += bytes;
    batch_.documents.push_back(document);
    if (batch_.bytes.size() >= kBatchBytes) submit();
  }

  void submit() {
    if (batch_.documents.empty()) return;
    DocumentBatch batch = std::exchange(batch_, {});
    if (build_.workers <= 1) return take(encode_batch(batch, options_, *tokenizer_));
    workers_.submit(std::move(batch));
    while (workers_.pending() > 2 * static_cast<size_t>(build_.workers)) take(workers_.next());
  }

  /// Waits until everything that was read is written.
  void drain() {
    submit();
    while (workers_.pending() > 0) take(workers_.next());
  }

  void take(const EncodedBatch& batch) {
    for (const BadDocument& bad : batch.bad) note_bad(bad);
    sink_.write(batch);
    done_.documents += batch.documents;
    done_.tokens += batch.tokens;
    tell_(done_);
  }

  void encode_part(const DocumentReader::Piece& piece, InputForm form, size_t input) {
    if (piece.begins) {
      drain();
      encoder_.begin_document(form);
    }
    encoder_.feed(piece.bytes);
    const bool is_text = form == InputForm::text;
    const auto note = [&](const std::optional<std::string>& problem) {
      if (problem) note_bad({build_.input[input], is_text ? 0 : piece.line, *problem});
    };
    if (is_text && !piece.ends && !build_.skip_bad) note(encoder_.problem_so_far());
    if (piece.ends) {
      const int64_t documents = encoder_.num_documents(), tokens = encoder_.num_tokens();
      note(encoder_.end_document());
      done_.documents += encoder_.num_documents() - documents;
      done_.tokens += encoder_.num_tokens() - tokens;
    }
    tell_(done_);
  }

  void note_bad(const BadDocument& bad) {
    require<FileError>(build_.skip_bad, "{}", bad.message());
    ++done_.skipped;
    if (done_.first_bad.size() < kToldBadDocuments) done_.first_bad.push_back(bad.message());
  }

  std::string after_skipping() const {
    if (done_.skipped == 0) return "";
    return fmt::format("; {} {} skipped, the first: {}", counted(done_.skipped, "document"),
                       done_.skipped == 1 ? "was" : "were", done_.first_bad.front());
  }

  const BuildDataset& build_;
  const std::function<void(const BuildProgress&)>& tell_;
  std::unique_ptr<Tokenizer> tokenizer_;
  BatchOptions options_;
  BuildProgress done_;
  DatasetSink sink_;
  DocumentEncoder encoder_;
  DocumentBatch batch_;
  Workers workers_;
};

}  // namespace

BuildProgress build_dataset(const BuildDataset& build,
                            const std::function<std::unique_ptr<Tokenizer>()>& make,
                            const std::function<void(const BuildProgress&)>& progress) {
  check_json_keys(build);
  check_outputs(build);
  return DatasetBuilder(build, make, progress).run();
}

}  // namespace lockstep
