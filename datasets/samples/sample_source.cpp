#include "lockstep/datasets/sample_source.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/core/config_rules.h"
#include "lockstep/datasets/blended_source.h"
#include "lockstep/datasets/document_source.h"
#include "lockstep/datasets/mock_source.h"
#include "lockstep/datasets/sample_marks.h"
#include "lockstep/datasets/text_source.h"

namespace lockstep {
namespace {

constexpr char kVocabularyField[] = "model.vocab_size - 1";

IndexCacheOptions cache_options(const DataConfig& config, const std::string& prefix) {
  if (config.cache_path) return {.folder = *config.cache_path, .required = true};
  return {.folder = std::filesystem::path(prefix).parent_path() / "cache", .required = false};
}

std::shared_ptr<const IndexedDataset> open_dataset(const std::string& prefix) {
  auto dataset = std::make_shared<const IndexedDataset>(prefix);
  require<FileError>(dataset->tokens().size > 0, "data.path: '{}.bin' is empty", prefix);
  return dataset;
}

/// The two splits of data sets that together are one set of documents.
SampleSources open_documents(const DataConfig& config, const std::vector<std::string>& prefixes,
                             int64_t vocabulary_size, int64_t seq_length, uint64_t seed,
                             ShortText short_validation = ShortText::has_no_sample) {
  const std::vector<double> shares = parse_split(split_of(config));
  DocumentList training(vocabulary_size, kVocabularyField);
  DocumentList validation(vocabulary_size, kVocabularyField);
  for (const std::string& prefix : prefixes) {
    const auto dataset = open_dataset(prefix);
    const auto parts = split_dataset(dataset->index(), shares);
    training.append(dataset, parts[0]);
    validation.append(dataset, parts[1]);
  }
  return {std::make_unique<DocumentSource>(std::move(training), seq_length, seed,
                                           cache_options(config, prefixes.front())),
          std::make_unique<WindowSource>(validation.text(), seq_length, short_validation), nullptr};
}

SampleSources open_blend(const DataConfig& config, int64_t vocabulary_size, int64_t seq_length,
                         uint64_t seed) {
  const std::vector<double> weights =
      normalize_weights(parse_blend(*config.blend, config.path.size()));
  std::vector<std::unique_ptr<SampleSource>> training, validation;
  std::string empty;
  for (const std::string& prefix : config.path) {
    SampleSources sources =
        open_documents(config, {prefix}, vocabulary_size, seq_length, seed, ShortText::is_repeated);
    if (empty.empty() && sources.validation->size() == 0)
      empty =
          fmt::format("data.split: the validation part of '{}' has no token for a sample", prefix);
    training.push_back(std::move(sources.training));
    validation.push_back(std::move(sources.validation));
  }
  return {.training = std::make_unique<BlendedSource>(std::move(training), weights),
          .validation = std::make_unique<BlendedSource>(std::move(validation), weights),
          .test = nullptr,
          .empty_validation = std::move(empty)};
}

/// The sources of `config.path`, by its split.
SampleSources open_path(const DataConfig& config, int64_t vocabulary_size, int64_t seq_length,
                        uint64_t seed) {
  const auto text = std::find_if_not(config.path.begin(), config.path.end(), is_dataset_prefix);
  require<ConfigError>(!config.blend || text == config.path.end(),
                       "data.blend: found '{}', allowed where all of data.path are data sets in "
                       "Megatron's format, which '{}' is not",
                       config.blend.value_or(""), text == config.path.end() ? "" : *text);
  if (config.blend) return open_blend(config, vocabulary_size, seq_length, seed);
  if (!config.path.empty() && text == config.path.end())
    return open_documents(config, config.path, vocabulary_size, seq_length, seed);
  TextSplit split = read_text(config, vocabulary_size);
  return {.training = std::make_unique<TextSource>(std::move(split.training), seq_length, seed),
          .validation = std::make_unique<WindowSource>(std::move(split.validation), seq_length),
          .test = nullptr,
          .endless_text = std::move(split.endless)};
}

/// All of `paths`, which the field `field` names. Sets `endless_text` unless it is set.
std::unique_ptr<SampleSource> open_whole(const std::vector<std::string>& paths,
                                         const std::string& field, const DataConfig& config,
                                         int64_t vocabulary_size, int64_t seq_length,
                                         std::string& endless_text) {
  DataConfig whole = config;
  whole.path = paths;
  whole.split = "1,0";
  TextSplit split = read_text(whole, vocabulary_size, field);
  if (endless_text.empty()) endless_text = std::move(split.endless);
  return std::make_unique<WindowSource>(std::move(split.training), seq_length);
}

std::unique_ptr<SampleSource> make_mock(const char* name, int64_t vocabulary_size, uint64_t seed) {
  return std::make_unique<MockSource>(vocabulary_size, seed, name);
}

}  // namespace

SampleMarks SampleSource::marks(int64_t /*sample*/, std::span<const int64_t> /*ids*/) { return {}; }

SampleSources open_samples(const DataConfig& config, int64_t vocabulary_size, int64_t seq_length,
                           uint64_t seed) {
  if (config.mock)
    return {make_mock("mock training", vocabulary_size, seed),
            make_mock("mock validation", vocabulary_size, seed), nullptr};
  SampleSources sources = open_path(config, vocabulary_size, seq_length, seed);
  const auto open = [&](const std::vector<std::string>& paths, const char* field) {
    return open_whole(paths, field, config, vocabulary_size, seq_length, sources.endless_text);
  };
  if (!config.valid_path.empty()) {
    sources.validation = open(config.valid_path, "data.valid_path");
    sources.empty_validation.clear();
  }
  if (!config.test_path.empty()) sources.test = open(config.test_path, "data.test_path");
  return with_document_marks(std::move(sources), config, vocabulary_size);
}

}  // namespace lockstep
