#include "lockstep/datasets/sample_source.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/core/config_rules.h"
#include "lockstep/datasets/crc32.h"

namespace lockstep {
namespace {

constexpr int64_t kLargeEpoch = 1 << 16;  // documents and samples that are worth a file
constexpr char kVocabularyField[] = "model.vocab_size - 1";

SampleIndexOptions one_epoch(int64_t seq_length, uint64_t seed, int64_t epoch) {
  return {.seq_length = seq_length,
          .seed = static_cast<uint32_t>(seed + static_cast<uint64_t>(epoch))};
}

IndexCacheOptions cache_options(const DataConfig& config, const std::string& prefix) {
  if (config.cache_path) return {.folder = *config.cache_path, .required = true};
  return {.folder = std::filesystem::path(prefix).parent_path() / "cache", .required = false};
}

std::shared_ptr<const IndexedDataset> open_dataset(const std::string& prefix) {
  auto dataset = std::make_shared<const IndexedDataset>(prefix);
  require<FileError>(dataset->tokens().size > 0, "data.path: '{}.bin' is empty", prefix);
  return dataset;
}

/// The two splits of data sets that are one set of documents.
SampleSources open_documents(const DataConfig& config, const std::vector<std::string>& prefixes,
                             int64_t vocabulary_size, int64_t seq_length, uint64_t seed) {
  const std::vector<double> shares = parse_split(config.split);
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
          std::make_unique<WindowSource>(validation.text(), seq_length)};
}

SampleSources open_blend(const DataConfig& config, int64_t vocabulary_size, int64_t seq_length,
                         uint64_t seed) {
  const std::vector<double> weights =
      normalize_weights(parse_blend(*config.blend, config.path.size()));
  std::vector<std::unique_ptr<SampleSource>> training, validation;
  for (const std::string& prefix : config.path) {
    SampleSources sources = open_documents(config, {prefix}, vocabulary_size, seq_length, seed);
    training.push_back(std::move(sources.training));
    validation.push_back(std::move(sources.validation));
  }
  return {std::make_unique<BlendedSource>(std::move(training), weights),
          std::make_unique<BlendedSource>(std::move(validation), weights)};
}

}  // namespace

void WindowSource::read(int64_t sample, std::span<int64_t> out) {
  text_.read(sample * seq_length_, out);
}

void TextSource::read(int64_t sample, std::span<int64_t> out) {
  text_.read(order_.start_of(sample), out);
}

DocumentSource::DocumentSource(DocumentList documents, int64_t seq_length, uint64_t seed,
                               IndexCacheOptions cache)
    : documents_(std::move(documents)),
      seq_length_(seq_length),
      seed_(seed),
      cache_(std::move(cache)),
      description_(documents_.description()),
      samples_per_epoch_((documents_.text().size() - 1) / seq_length) {
  require<ConfigError>(documents_.text().size() > seq_length,
                       "data.path: the training documents of '{}' have {} tokens, allowed: more "
                       "than model.seq_length ({})",
                       documents_.name(), documents_.text().size(), seq_length);
}

SampleIndex DocumentSource::build(int64_t epoch) const {
  const std::vector<int32_t> lengths = documents_.lengths();
  return build_sample_index({reinterpret_cast<const char*>(lengths.data()), documents_.size()},
                            {0, documents_.size()}, one_epoch(seq_length_, seed_, epoch));
}

void DocumentSource::open_epoch(int64_t epoch) {
  if (epoch == epoch_) return;
  if (epoch > 0 && documents_.size() + samples_per_epoch_ < kLargeEpoch) {
    index_ = view_of(build(epoch));
  } else {
    const std::string settings = fmt::format("samples of {} tokens, seed {}, epoch {}\n",
                                             seq_length_, static_cast<uint32_t>(seed_), epoch);
    const std::string file = fmt::format("{}-{:08x}.samples", documents_.base_name(),
                                         crc32(documents_.name() + "\n" + settings));
    index_ = cached_sample_index({.path = std::filesystem::path(cache_.folder) / file,
                                  .description = settings + description_,
                                  .required = cache_.required},
                                 [&] { return build(epoch); });
  }
  epoch_ = epoch;
}

void DocumentSource::fail_by_index(int64_t sample) const {
  fail<FileError>(
      "'{}': sample {} of epoch {}: its index does not fit the data; remove the folder "
      "'{}' to have it built again",
      documents_.name(), sample, epoch_, cache_.folder);
}

void DocumentSource::read(int64_t sample, std::span<int64_t> out) {
  open_epoch(sample / samples_per_epoch_);
  const int64_t in_epoch = sample % samples_per_epoch_;
  if (index_.num_samples() != samples_per_epoch_) fail_by_index(in_epoch);
  const int64_t number = index_.order[in_epoch];
  if (number < 0 || number >= samples_per_epoch_) fail_by_index(in_epoch);
  auto [place, offset] = index_.starts[number];
  while (!out.empty()) {
    if (place < 0 || place >= index_.documents.size()) fail_by_index(in_epoch);
    const int32_t document = index_.documents[place];
    if (document < 0 || document >= documents_.size()) fail_by_index(in_epoch);
    const int64_t left = documents_.length(document) - offset;
    if (offset < 0 || left < 0) fail_by_index(in_epoch);
    const auto here = std::min(static_cast<size_t>(left), out.size());
    documents_.text().read(documents_.begin(document) + offset, out.first(here));
    out = out.subspan(here);
    ++place;
    offset = 0;
  }
}

BlendedSource::BlendedSource(std::vector<std::unique_ptr<SampleSource>> sources,
                             std::vector<double> weights)
    : sources_(std::move(sources)), weights_(std::move(weights)), drawn_(1) {
  drawn_[0].resize(sources_.size());
  const bool endless = std::all_of(sources_.begin(), sources_.end(),
                                   [](const auto& source) { return source->size() == kEndless; });
  if (endless) return;
  for (int64_t block = 0; size_ == kEndless; ++block) {
    open_block(block);
    const auto end =
        std::find_if(samples_.begin(), samples_.end(), [&](const BlendedSample& sample) {
          return sample.sample >= sources_[static_cast<size_t>(sample.dataset)]->size();
        });
    if (end != samples_.end()) size_ = block * kBlock + (end - samples_.begin());
  }
}

void BlendedSource::open_block(int64_t block) {
  if (block == block_) return;
  for (auto reached = static_cast<int64_t>(drawn_.size()) - 1; reached < block; ++reached) {
    drawn_.push_back(drawn_.back());
    continue_blend(weights_, drawn_.back(), kBlock);
  }
  std::vector<int64_t> drawn = drawn_[static_cast<size_t>(block)];
  samples_ = continue_blend(weights_, drawn, kBlock);
  if (block + 1 == static_cast<int64_t>(drawn_.size())) drawn_.push_back(std::move(drawn));
  block_ = block;
}

void BlendedSource::read(int64_t sample, std::span<int64_t> out) {
  require<UsageError>(sample >= 0 && sample < size_, "blend: sample {}, allowed: 0 to {}", sample,
                      size_ - 1);
  open_block(sample / kBlock);
  const BlendedSample at = samples_[static_cast<size_t>(sample % kBlock)];
  sources_[static_cast<size_t>(at.dataset)]->read(at.sample, out);
}

SampleSources open_samples(const DataConfig& config, int64_t vocabulary_size, int64_t seq_length,
                           uint64_t seed) {
  const auto text = std::find_if_not(config.path.begin(), config.path.end(), is_dataset_prefix);
  require<ConfigError>(!config.blend || text == config.path.end(),
                       "data.blend: allowed with data sets in Megatron's format alone; data.path "
                       "has '{}', which is none",
                       text == config.path.end() ? "" : *text);
  if (config.blend) return open_blend(config, vocabulary_size, seq_length, seed);
  if (!config.path.empty() && text == config.path.end())
    return open_documents(config, config.path, vocabulary_size, seq_length, seed);
  TextSplit split = read_text(config, vocabulary_size);
  return {std::make_unique<TextSource>(std::move(split.training), seq_length, seed),
          std::make_unique<WindowSource>(std::move(split.validation), seq_length)};
}

}  // namespace lockstep
