#include "lockstep/datasets/indexed_dataset_writer.h"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/datasets/dataset_index.h"

namespace lockstep {
namespace {

constexpr size_t kBufferBytes = 1 << 20;

template <class T>
std::string_view bytes_of(const T* values, size_t count) {
  return {reinterpret_cast<const char*>(values), count * sizeof(T)};
}

}  // namespace

IndexedDatasetWriter::IndexedDatasetWriter(std::string prefix, TokenType type, bool with_modes)
    : type_(type), with_modes_(with_modes), bin_(prefix + ".bin"), idx_(prefix + ".idx") {
  buffer_.reserve(2 * kBufferBytes);
}

void IndexedDatasetWriter::flush() {
  bin_.write(buffer_);
  buffer_.clear();
}

void IndexedDatasetWriter::append(std::span<const int64_t> ids) {
  pack_tokens(ids, type_, buffer_);
  open_ += static_cast<int64_t>(ids.size());
  if (buffer_.size() >= kBufferBytes) flush();
}

void IndexedDatasetWriter::append_packed(std::string_view numbers) {
  const auto bytes = static_cast<size_t>(token_type_bytes(type_));
  require<UsageError>(numbers.size() % bytes == 0,
                      "'{}': found {} bytes, allowed: a multiple of the {} of {}",
                      bin_.final_path(), numbers.size(), bytes, token_type_name(type_));
  buffer_ += numbers;
  open_ += static_cast<int64_t>(numbers.size() / bytes);
  if (buffer_.size() >= kBufferBytes) flush();
}

void IndexedDatasetWriter::drop_sequence() {
  const auto bytes = static_cast<size_t>(std::exchange(open_, 0) * token_type_bytes(type_));
  const size_t buffered = std::min(bytes, buffer_.size());
  buffer_.resize(buffer_.size() - buffered);
  if (bytes > buffered) bin_.take_back(static_cast<int64_t>(bytes - buffered));
}

void IndexedDatasetWriter::end_sequence(int8_t mode) {
  constexpr int32_t kLongest = std::numeric_limits<int32_t>::max();
  require<UsageError>(open_ <= kLongest, "'{}': length of sequence {}: found {}, allowed: up to {}",
                      idx_.final_path(), lengths_.size(), open_, kLongest);
  require<UsageError>(with_modes_ || mode == 0,
                      "'{}': mode of sequence {}: found {}, allowed: 0 in a set without modes",
                      idx_.final_path(), lengths_.size(), mode);
  num_tokens_ += open_;
  lengths_.push_back(static_cast<int32_t>(std::exchange(open_, 0)));
  if (with_modes_) modes_.push_back(mode);
}

void IndexedDatasetWriter::end_document() {
  require<UsageError>(open_ == 0, "'{}': a document ends inside sequence {}", idx_.final_path(),
                      lengths_.size());
  bounds_.push_back(static_cast<int64_t>(lengths_.size()));
}

void IndexedDatasetWriter::write_index() {
  const auto number = [&](auto value) { idx_.write(bytes_of(&value, 1)); };
  idx_.write(kIndexMagic);
  number(kIndexVersion);
  number(type_);
  number(static_cast<uint64_t>(lengths_.size()));
  number(static_cast<uint64_t>(bounds_.size()));
  idx_.write(bytes_of(lengths_.data(), lengths_.size()));
  constexpr size_t kPointersAtOnce = 1 << 16;
  std::vector<int64_t> pointers;
  int64_t end = 0;
  for (const int32_t length : lengths_) {
    pointers.push_back(end);
    end += length * token_type_bytes(type_);
    if (pointers.size() < kPointersAtOnce) continue;
    idx_.write(bytes_of(pointers.data(), pointers.size()));
    pointers.clear();
  }
  idx_.write(bytes_of(pointers.data(), pointers.size()));
  idx_.write(bytes_of(bounds_.data(), bounds_.size()));
  idx_.write(bytes_of(modes_.data(), modes_.size()));
}

void IndexedDatasetWriter::prepare() {
  const auto sequences = static_cast<int64_t>(lengths_.size());
  require<UsageError>(open_ == 0 && bounds_.back() == sequences,
                      "'{}': sequence {} is in no document", idx_.final_path(),
                      open_ == 0 ? sequences - 1 : sequences);
  flush();
  write_index();
  bin_.sync();
  idx_.sync();
}

void IndexedDatasetWriter::publish() {
  // Between these steps the old index must not lie next to the new numbers.
  ::unlink(idx_.final_path().c_str());
  bin_.publish();
  idx_.publish();
  sync_folder_of(idx_.final_path());
}

void IndexedDatasetWriter::finish() {
  prepare();
  publish();
}

}  // namespace lockstep
