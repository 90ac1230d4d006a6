#include "lockstep/datasets/document_source.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/datasets/crc32.h"

namespace lockstep {
namespace {

constexpr int64_t kLargeEpoch = 1 << 16;  // documents and samples that are worth a file

SampleIndexOptions one_epoch(int64_t seq_length, uint64_t seed, int64_t epoch) {
  return {.seq_length = seq_length,
          .seed = static_cast<uint32_t>(seed + static_cast<uint64_t>(epoch))};
}

}  // namespace

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
    const std::string description = fmt::format("samples of {} tokens, seed {}, epoch {}\n",
                                                seq_length_, static_cast<uint32_t>(seed_), epoch) +
                                    description_;
    const std::string file =
        fmt::format("{}-{:08x}.samples", documents_.base_name(), crc32(description));
    index_ = cached_sample_index({.path = std::filesystem::path(cache_.folder) / file,
                                  .description = description,
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

}  // namespace lockstep
