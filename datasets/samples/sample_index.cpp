#include "lockstep/datasets/sample_index.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

/// Shuffles all of `values`, or the first `first` and the others separately.
template <class T>
void shuffle_in_two(std::vector<T>& values, size_t first, NumpyShuffle& shuffle) {
  const std::span<T> all(values);
  shuffle(all.first(first));
  if (first < values.size()) shuffle(all.subspan(first));
}

void check_sample_length(const SampleIndexOptions& options) {
  const bool usable =
      options.seq_length > 0 && (options.extra_tokens == 0 || options.extra_tokens == 1);
  require<UsageError>(usable, "samples of {} + {} tokens, allowed: 1 or more, and 0 or 1 more",
                      options.seq_length, options.extra_tokens);
}

int64_t epochs_for(int64_t tokens_per_epoch, const SampleIndexOptions& options) {
  if (options.num_samples == 0) return 1;
  const int64_t needed = options.num_samples * options.seq_length + options.extra_tokens;
  return std::max<int64_t>((needed + tokens_per_epoch - 1) / tokens_per_epoch, 1);
}

}  // namespace

void NumpyShuffle::check_size(size_t size) {
  constexpr uint64_t kMost = uint64_t(1) << 32;
  require<UsageError>(size <= kMost, "shuffle: found {} values, allowed: up to {}", size, kMost);
}

size_t NumpyShuffle::draw(size_t last) {
  const size_t mask = std::bit_ceil(last + 1) - 1;
  while (true) {
    const size_t value = generator_() & mask;
    if (value <= last) return value;
  }
}

std::array<DocumentRange, 3> split_documents(std::span<const double> shares, int64_t documents) {
  double sum = 0;
  for (const double share : shares) {
    require<UsageError>(share >= 0, "split: found {}, allowed: shares >= 0", share);
    sum += share;
  }
  require<UsageError>(std::abs(sum - 1) < 1e-9 && shares.size() <= 3,
                      "split: found {} shares with the sum {}, allowed: up to 3, with the sum 1",
                      shares.size(), sum);
  std::array<DocumentRange, 3> ranges;
  double before = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const double after = before + (i < shares.size() ? shares[i] : 0);
    const auto bound = [&](double share) {
      return std::min(static_cast<int64_t>(std::nearbyint(share * static_cast<double>(documents))),
                      documents);
    };
    ranges[i] = {bound(before), bound(after)};
    before = after;
  }
  return ranges;
}

std::vector<SampleStart> build_sample_starts(const PackedArray<int32_t>& lengths,
                                             std::span<const int32_t> documents,
                                             const SampleIndexOptions& options) {
  check_sample_length(options);
  int64_t tokens = 0;
  for (const int32_t document : documents) tokens += lengths[document];
  const int64_t seq_length = options.seq_length, extra = options.extra_tokens;
  const int64_t samples = options.drop_last_partial
                              ? (tokens - extra) / seq_length
                              : static_cast<int64_t>(std::ceil(static_cast<float>(tokens - extra) /
                                                               static_cast<float>(seq_length)));
  require<UsageError>(samples > 0, "{} tokens, allowed: enough for a sample of {} + {}", tokens,
                      seq_length, extra);
  std::vector<SampleStart> starts = {{}};
  starts.reserve(static_cast<size_t>(samples) + 1);
  const auto last = static_cast<int64_t>(documents.size()) - 1;
  SampleStart place;
  while (static_cast<int64_t>(starts.size()) <= samples) {
    for (int64_t needed = seq_length + extra; needed > 0;) {
      const int64_t length = lengths[documents[static_cast<size_t>(place.document)]];
      const int64_t left = length - place.offset;
      if (needed <= left) {
        place.offset += needed - extra;
        break;
      }
      needed -= left;
      if (place.document == last) {
        place.offset = std::max<int64_t>(length - extra, 0);
        break;
      }
      place = {place.document + 1, 0};
    }
    starts.push_back(place);
  }
  return starts;
}

SampleIndex build_sample_index(const PackedArray<int32_t>& lengths, DocumentRange range,
                               const SampleIndexOptions& options) {
  check_sample_length(options);
  const bool inside = range.begin >= 0 && range.begin <= range.end && range.end <= lengths.size() &&
                      range.end <= std::numeric_limits<int32_t>::max();
  require<UsageError>(inside, "documents {} to {}, allowed: inside 0 to {}", range.begin, range.end,
                      lengths.size());
  std::vector<int32_t> epoch(static_cast<size_t>(range.end - range.begin));
  std::iota(epoch.begin(), epoch.end(), static_cast<int32_t>(range.begin));
  int64_t tokens = 0;
  for (const int32_t document : epoch) tokens += lengths[document];
  require<UsageError>(tokens > 0, "documents {} to {} have no tokens", range.begin, range.end);

  SampleIndex index;
  index.epochs = epochs_for(tokens, options);
  // Samples that begin before the last epoch, if that is to be shuffled separately.
  const int64_t before_last =
      ((index.epochs - 1) * tokens - options.extra_tokens) / options.seq_length;
  const int64_t per_epoch = (tokens - options.extra_tokens) / options.seq_length;
  const auto threshold = static_cast<int64_t>(0.80 * static_cast<double>(per_epoch));
  const bool apart = index.epochs > 1 && options.num_samples - before_last < threshold;

  NumpyShuffle shuffle(options.seed);
  for (int64_t i = 0; i < index.epochs; ++i)
    index.documents.insert(index.documents.end(), epoch.begin(), epoch.end());
  shuffle_in_two(index.documents, index.documents.size() - (apart ? epoch.size() : 0), shuffle);
  index.starts = build_sample_starts(lengths, index.documents, options);
  index.order.resize(index.starts.size() - 1);
  std::iota(index.order.begin(), index.order.end(), 0);
  shuffle_in_two(index.order, apart ? static_cast<size_t>(before_last) : index.order.size(),
                 shuffle);
  return index;
}

}  // namespace lockstep
