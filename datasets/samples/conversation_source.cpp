#include "lockstep/datasets/conversation_source.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/core/config_rules.h"
#include "lockstep/core/counted.h"
#include "lockstep/core/philox.h"
#include "lockstep/datasets/sample_marks.h"

namespace lockstep {
namespace {

double percent(int64_t part, int64_t whole) {
  return whole == 0 ? 0 : 100 * static_cast<double>(part) / static_cast<double>(whole);
}

/// Says how many samples the conversations in `ranges` became, and what the set's files lost.
std::string note_of(const ConversationSet& set, const std::vector<ConversationRange>& ranges,
                    int64_t samples, const char* field, int64_t seq_length) {
  int64_t conversations = 0, tokens = 0, learned = 0;
  for (const ConversationRange& range : ranges) {
    conversations += range.size();
    tokens += set.num_tokens(range);
    learned += set.num_learned(range);
  }
  std::string note =
      fmt::format("{}: {} in {} of {}, {:.1f} % filled, {:.1f} % with loss", field,
                  counted(conversations, "conversation"), counted(samples, "sample"),
                  counted(seq_length, "token"), percent(tokens, samples * seq_length),
                  percent(learned, samples * seq_length));
  if (set.num_cut() > 0) note += fmt::format("; {} cut at model.seq_length", set.num_cut());
  if (set.num_empty() > 0)
    note += fmt::format("; {} left out, which have no token of an assistant{}", set.num_empty(),
                        set.num_cut() > 0 ? " within it" : "");
  return note;
}

/// The parts of each file.
struct ConversationSplit {
  std::vector<ConversationRange> training, validation, read;  ///< read: both of them
};

ConversationSplit split_files(const ConversationSet& set, const std::vector<double>& shares) {
  ConversationSplit split;
  for (const ConversationRange& file : set.files()) {
    const auto cut = [&](double share) {
      const auto size = static_cast<double>(file.size());
      return file.first + std::min<int64_t>(std::llround(share * size), file.size());
    };
    const int64_t training = cut(shares[0]), validation = cut(shares[0] + shares[1]);
    split.training.push_back({file.first, training});
    split.validation.push_back({training, validation});
    split.read.push_back({file.first, validation});
  }
  return split;
}

}  // namespace

ConversationSource::ConversationSource(std::shared_ptr<const ConversationSet> set,
                                       const std::vector<ConversationRange>& ranges,
                                       int64_t seq_length, uint64_t seed, bool endless)
    : set_(std::move(set)), seq_length_(seq_length), seed_(seed), endless_(endless) {
  for (const ConversationRange& range : ranges)
    for (int64_t number = range.first; number < range.last; ++number) {
      numbers_.push_back(number);
      lengths_.push_back(set_->length(number));
    }
  require<UsageError>(!endless || !lengths_.empty(),
                      "ConversationSource: found no conversations, allowed: >= 1");
  open_epoch(0);
  samples_per_epoch_ = packing_.bins();
}

void ConversationSource::open_epoch(int64_t epoch) {
  if (epoch == epoch_) return;
  std::vector<int64_t> order(lengths_.size());
  std::iota(order.begin(), order.end(), int64_t{0});
  if (endless_) {
    const Permutation shuffled(order.size(), seed_,
                               fmt::format("conversations of epoch {}", epoch));
    for (int64_t& item : order) item = static_cast<int64_t>(shuffled(static_cast<uint64_t>(item)));
  }
  packing_ = pack_best_fit(lengths_, order, seq_length_);
  epoch_ = epoch;
}

std::vector<int64_t> ConversationSource::conversations_of(int64_t sample) {
  const int64_t epoch = sample / samples_per_epoch_;
  open_epoch(epoch);
  const auto bins = static_cast<uint64_t>(samples_per_epoch_);
  const Permutation shuffled =
      endless_ ? Permutation(bins, seed_, fmt::format("packed samples of epoch {}", epoch))
               : Permutation(bins, 0, "evaluated samples");
  const uint64_t bin = shuffled(static_cast<uint64_t>(sample % samples_per_epoch_));
  std::vector<int64_t> numbers;
  for (const int64_t item : packing_.of_bin(static_cast<int64_t>(bin)))
    numbers.push_back(numbers_[static_cast<size_t>(item)]);
  return numbers;
}

void ConversationSource::read(int64_t sample, std::span<int64_t> out) {
  auto to = out.begin();
  for (const int64_t number : conversations_of(sample)) {
    const std::span<const uint32_t> ids = set_->ids(number);
    to = std::copy(ids.begin(), ids.end(), to);
  }
  std::fill(to, out.end(), 0);
}

SampleMarks ConversationSource::marks(int64_t sample, std::span<const int64_t> /*ids*/) {
  SampleMarks marks;
  for (const int64_t number : conversations_of(sample)) {
    const std::span<const uint8_t> learned = set_->learned(number);
    marks.documents.push_back(set_->length(number));
    marks.loss.insert(marks.loss.end(), learned.begin() + 1, learned.end());
    marks.loss.push_back(0);  // after the last token comes another conversation
  }
  const int64_t filled = static_cast<int64_t>(marks.loss.size());
  marks.padding = seq_length_ - filled;
  if (marks.padding > 0) marks.documents.push_back(marks.padding);
  marks.loss.resize(static_cast<size_t>(seq_length_), 0);
  marks.positions = positions_in_documents(marks.documents, seq_length_);
  return marks;
}

SampleSources open_conversations(const DataConfig& config, int64_t vocabulary_size,
                                 int64_t seq_length, uint64_t seed) {
  SampleSources sources;
  const auto read = [&](const std::vector<std::string>& paths, const char* field) {
    return std::make_shared<const ConversationSet>(
        paths, field, config, ConversationSet::Limits{vocabulary_size, seq_length});
  };
  const auto whole = [&](const std::vector<std::string>& paths, const char* field) {
    const auto set = read(paths, field);
    auto source = std::make_unique<ConversationSource>(set, set->files(), seq_length, seed,
                                                       /*endless=*/false);
    sources.notes.push_back(
        note_of(*set, set->files(), source->samples_per_epoch(), field, seq_length));
    return source;
  };
  const auto set = read(config.path, "data.path");
  const ConversationSplit split = split_files(*set, parse_split(split_of(config)));
  const bool trains = std::any_of(split.training.begin(), split.training.end(),
                                  [](const ConversationRange& range) { return range.size() > 0; });
  require<ConfigError>(trains,
                       "data.path: found {} conversations with a token of an assistant within "
                       "model.seq_length ({}) and {} without, of which none is for training; "
                       "allowed: one or more",
                       set->size(), seq_length, set->num_empty());
  auto source = std::make_unique<ConversationSource>(set, split.training, seq_length, seed,
                                                     /*endless=*/true);
  auto validating = std::make_unique<ConversationSource>(set, split.validation, seq_length, seed,
                                                         /*endless=*/false);
  const int64_t samples = source->samples_per_epoch() + validating->samples_per_epoch();
  sources.notes.push_back(note_of(*set, split.read, samples, "data.path", seq_length));
  sources.training = std::move(source);
  sources.validation = std::move(validating);
  if (!config.valid_path.empty()) sources.validation = whole(config.valid_path, "data.valid_path");
  if (!config.test_path.empty()) sources.test = whole(config.test_path, "data.test_path");
  return sources;
}

}  // namespace lockstep
