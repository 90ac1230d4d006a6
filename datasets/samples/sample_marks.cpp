#include "lockstep/datasets/sample_marks.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/core/counted.h"
#include "lockstep/datasets/indexed_dataset.h"
#include "lockstep/datasets/tokenizer.h"

namespace lockstep {
namespace {

/// Lengths of the documents of `tokens`, the ends included.
std::vector<int64_t> document_lengths(std::span<const int64_t> tokens, int64_t end_of_document) {
  std::vector<int64_t> lengths;
  int64_t length = 0;
  for (const int64_t id : tokens) {
    ++length;
    if (id != end_of_document) continue;
    lengths.push_back(length);
    length = 0;
  }
  if (length > 0) lengths.push_back(length);
  return lengths;
}

/// What the first documents of a data set show.
struct FirstDocuments {
  int64_t count = 0;  ///< of those that have tokens
  int64_t ended = 0;  ///< of those whose last id is the end of a document
  int64_t largest_id = 0;
};

FirstDocuments look_at_documents(const IndexedDataset& dataset, int64_t end_of_document) {
  constexpr int64_t kMostDocuments = 100, kMostTokens = 64;  // of each document, the last ones
  const DatasetIndex& index = dataset.index();
  FirstDocuments found;
  for (int64_t d = 0; d < index.num_documents() && found.count < kMostDocuments; ++d) {
    int64_t last = index.bounds[d + 1] - 1;
    while (last >= index.bounds[d] && index.lengths[last] == 0) --last;
    if (last < index.bounds[d]) continue;
    const int64_t length = index.lengths[last];
    std::vector<int64_t> ids(static_cast<size_t>(std::min(length, kMostTokens)));
    dataset.sequence(last).read(length - static_cast<int64_t>(ids.size()), ids);
    ++found.count;
    if (ids.back() == end_of_document) ++found.ended;
    found.largest_id = std::max(found.largest_id, *std::max_element(ids.begin(), ids.end()));
  }
  return found;
}

const char* field_of_marks(const DataConfig& config) {
  return config.reset_position_ids     ? "data.reset_position_ids"
         : config.reset_attention_mask ? "data.reset_attention_mask"
                                       : "data.eod_mask_loss";
}

std::string note_on_text(const DataConfig& config, const std::string& path, int64_t end) {
  return fmt::format(
      "{}: the text file '{}' does not have {}, the end of a document of {} (data.tokenizer); "
      "`lockstep data build --append-eod` makes a data set with ends",
      field_of_marks(config), path, end, config.tokenizer);
}

/// A note on the first data set whose documents do not end with the tokenizer's end of a document.
std::string note_on_ends(const DataConfig& config, const Tokenizer& tokenizer) {
  const int64_t end = tokenizer.end_of_document();
  for (const auto* const paths : {&config.path, &config.valid_path, &config.test_path})
    for (const std::string& path : *paths) {
      if (!is_dataset_prefix(path)) continue;
      const FirstDocuments found = look_at_documents(IndexedDataset(path), end);
      if (found.count == 0 || found.ended > 0) continue;
      std::string note = fmt::format(
          "{}: of the first {} of '{}' none ends with {}, the end of a document of {} "
          "(data.tokenizer)",
          field_of_marks(config), counted(found.count, "document"), path, end, config.tokenizer);
      if (found.largest_id >= tokenizer.vocabulary_size())
        note += fmt::format("; they have the id {}, which that tokenizer lacks", found.largest_id);
      return note;
    }
  return "";
}

}  // namespace

std::vector<int64_t> positions_in_documents(std::span<const int64_t> lengths, int64_t seq_length) {
  std::vector<int64_t> positions;
  positions.reserve(static_cast<size_t>(seq_length));
  for (const int64_t length : lengths)
    for (int64_t place = 0; place < length; ++place) positions.push_back(place);
  const auto found = static_cast<int64_t>(positions.size());
  require<UsageError>(found == seq_length, "documents: found {} tokens in all, allowed: {}", found,
                      seq_length);
  return positions;
}

SampleMarks mark_documents(std::span<const int64_t> ids, const DocumentRules& rules) {
  const std::span<const int64_t> tokens = ids.first(ids.size() - 1);
  SampleMarks marks;
  std::vector<int64_t> lengths = document_lengths(tokens, rules.end_of_document);
  if (rules.reset_position_ids)
    marks.positions = positions_in_documents(lengths, static_cast<int64_t>(tokens.size()));
  if (rules.eod_mask_loss)
    for (const int64_t id : tokens) marks.loss.push_back(id == rules.end_of_document ? 0 : 1);
  if (rules.reset_attention_mask) marks.documents = std::move(lengths);
  return marks;
}

bool marks_documents(const DataConfig& config) {
  return config.reset_position_ids || config.reset_attention_mask || config.eod_mask_loss;
}

SampleSources with_document_marks(SampleSources sources, const DataConfig& config,
                                  int64_t vocabulary_size) {
  if (!marks_documents(config)) return sources;
  const auto tokenizer = make_tokenizer(config.tokenizer, "data.tokenizer");
  const int64_t end = tokenizer->end_of_document();
  require<ConfigError>(end < vocabulary_size,
                       "model.vocab_size: found {}, allowed with {}: more than {}, the end of "
                       "a document of data.tokenizer = {}",
                       vocabulary_size, field_of_marks(config), end, config.tokenizer);
  if (std::string note = note_on_ends(config, *tokenizer); !note.empty())
    sources.notes.push_back(std::move(note));
  if (!sources.endless_text.empty())
    sources.notes.push_back(note_on_text(config, sources.endless_text, end));
  const DocumentRules rules = {end, config.reset_position_ids, config.reset_attention_mask,
                               config.eod_mask_loss};
  for (std::unique_ptr<SampleSource>* const source :
       {&sources.training, &sources.validation, &sources.test})
    if (*source) *source = std::make_unique<MarkedSource>(std::move(*source), rules);
  return sources;
}

}  // namespace lockstep
