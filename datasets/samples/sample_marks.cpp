#include "lockstep/datasets/sample_marks.h"

#include "lockstep/core/check.h"
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

SampleSources with_document_marks(SampleSources sources, const DataConfig& config,
                                  int64_t vocabulary_size) {
  if (!config.reset_position_ids && !config.reset_attention_mask && !config.eod_mask_loss)
    return sources;
  const int64_t end = make_tokenizer(config.tokenizer, "data.tokenizer")->end_of_document();
  require<ConfigError>(end < vocabulary_size,
                       "model.vocab_size: found {}, allowed with data.{}: more than {}, the end of "
                       "a document of data.tokenizer = {}",
                       vocabulary_size,
                       config.reset_position_ids     ? "reset_position_ids"
                       : config.reset_attention_mask ? "reset_attention_mask"
                                                     : "eod_mask_loss",
                       end, config.tokenizer);
  const DocumentRules rules = {end, config.reset_position_ids, config.reset_attention_mask,
                               config.eod_mask_loss};
  for (std::unique_ptr<SampleSource>* const source :
       {&sources.training, &sources.validation, &sources.test})
    if (*source) *source = std::make_unique<MarkedSource>(std::move(*source), rules);
  return sources;
}

}  // namespace lockstep
