#include "lockstep/datasets/document_list.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>

#include "lockstep/core/check.h"
#include "lockstep/datasets/crc32.h"

namespace lockstep {
namespace {

/// The first token of sequence `sequence`, or the end of the last one.
int64_t first_token(const DatasetIndex& index, int64_t sequence) {
  if (sequence == index.num_sequences()) return index.num_tokens;
  return index.pointers[sequence] / token_type_bytes(index.type);
}

/// The sequence that has token `token`.
int64_t sequence_of(const DatasetIndex& index, int64_t token) {
  int64_t low = 0, high = index.num_sequences();
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (first_token(index, middle) <= token ? low : high) = middle;
  }
  return low;
}

DatasetPart whole_documents(const DatasetIndex& index, DocumentRange range) {
  return {.range = range,
          .begin = first_token(index, range.begin),
          .end = first_token(index, range.end)};
}

DatasetPart cut_documents(const DatasetIndex& index, int64_t begin, int64_t end) {
  if (begin == end) return {.range = {}, .begin = begin, .end = end};
  const int64_t first = sequence_of(index, begin), last = sequence_of(index, end - 1);
  return {.range = {first, last + 1},
          .skipped = begin - first_token(index, first),
          .cut = first_token(index, last) + index.lengths[last] - end,
          .begin = begin,
          .end = end};
}

}  // namespace

std::array<DatasetPart, 2> split_dataset(const DatasetIndex& index,
                                         std::span<const double> shares) {
  const auto ranges = split_documents(shares, index.num_sequences());
  std::array<DatasetPart, 2> parts = {whole_documents(index, ranges[0]),
                                      whole_documents(index, ranges[1])};
  const auto share = [&](size_t i) { return i < shares.size() ? shares[i] : 0.0; };
  const bool dealt_out =
      (share(0) == 0 || parts[0].tokens() > 0) && (share(1) == 0 || parts[1].tokens() > 0);
  if (dealt_out) return parts;
  const auto place = [&](double before) {
    return std::min<int64_t>(std::llround(before * static_cast<double>(index.num_tokens)),
                             index.num_tokens);
  };
  const int64_t training = place(share(0)), validation = place(share(0) + share(1));
  return {cut_documents(index, 0, training), cut_documents(index, training, validation)};
}

void DocumentList::append(const std::shared_ptr<const IndexedDataset>& dataset,
                          const DatasetPart& part) {
  const int64_t documents = part.range.end - part.range.begin;
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  require<UsageError>(documents <= kMost - size_, "'{}': more than {} documents in one list",
                      dataset->prefix(), kMost);
  if (documents == 0) return;
  parts_.push_back({dataset, part, size_, tokens_.size()});
  size_ += documents;
  tokens_.append(dataset, dataset->tokens().part(part.begin, part.end), dataset->prefix() + ".bin",
                 part.begin);
}

const DocumentList::Part& DocumentList::part_of(int64_t document) const {
  require<UsageError>(document >= 0 && document < size_,
                      "DocumentList: found document {}, allowed: 0 to {}", document, size_ - 1);
  const auto after = std::upper_bound(parts_.begin(), parts_.end(), document,
                                      [](int64_t d, const Part& p) { return d < p.first; });
  return *std::prev(after);
}

int64_t DocumentList::length(int64_t document) const {
  const Part& at = part_of(document);
  const DocumentRange range = at.part.range;
  const int64_t sequence = range.begin + document - at.first;
  return at.dataset->index().lengths[sequence] - (sequence == range.begin ? at.part.skipped : 0) -
         (sequence + 1 == range.end ? at.part.cut : 0);
}

int64_t DocumentList::begin(int64_t document) const {
  const Part& at = part_of(document);
  const int64_t sequence = at.part.range.begin + document - at.first;
  return at.begin +
         std::max<int64_t>(first_token(at.dataset->index(), sequence) - at.part.begin, 0);
}

std::vector<int32_t> DocumentList::lengths() const {
  std::vector<int32_t> lengths;
  lengths.reserve(static_cast<size_t>(size_));
  for (int64_t document = 0; document < size_; ++document)
    lengths.push_back(static_cast<int32_t>(length(document)));
  return lengths;
}

std::string DocumentList::name() const {
  std::vector<std::string> prefixes;
  for (const Part& at : parts_) prefixes.push_back(at.dataset->prefix());
  return fmt::format("{}", fmt::join(prefixes, "', '"));
}

std::string DocumentList::base_name() const {
  return parts_.empty() ? "" : std::filesystem::path(parts_.front().dataset->prefix()).filename();
}

std::string DocumentList::description() const {
  std::string text;
  for (const Part& at : parts_) {
    const std::string_view idx = at.dataset->index_bytes();
    text +=
        fmt::format("documents {} to {} without {} and {} tokens of an index of {} bytes, {:08x}\n",
                    at.part.range.begin, at.part.range.end, at.part.skipped, at.part.cut,
                    idx.size(), crc32(idx));
  }
  return text;
}

}  // namespace lockstep
