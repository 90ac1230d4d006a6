#include "lockstep/training/data/indexed_dataset_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/training/data/dataset_index.h"

namespace lockstep {
namespace {

constexpr size_t kBufferBytes = 1 << 20;

void sync_folder_of(const std::string& path) {
  const auto parent = std::filesystem::path(path).parent_path();
  const int folder = ::open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY);
  if (folder < 0) return;
  ::fsync(folder);  // some file systems refuse it for folders
  ::close(folder);
}

template <class T>
std::string_view bytes_of(const T* values, size_t count) {
  return {reinterpret_cast<const char*>(values), count * sizeof(T)};
}

}  // namespace

UnfinishedFile::UnfinishedFile(std::string final_path)
    : final_path_(std::move(final_path)),
      path_(fmt::format("{}.unfinished.{}", final_path_, ::getpid())),
      file_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) {
  if (file_ < 0) fail_with_reason("made");
}

UnfinishedFile::~UnfinishedFile() {
  if (file_ >= 0) ::close(file_);
  if (!path_.empty()) ::unlink(path_.c_str());
}

void UnfinishedFile::fail_with_reason(std::string_view action) const {
  fail<FileError>("'{}' cannot be {}: {}", final_path_, action, std::strerror(errno));
}

void UnfinishedFile::write(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(file_, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail_with_reason("written");
    bytes.remove_prefix(static_cast<size_t>(written));
  }
}

void UnfinishedFile::sync() {
  if (::fsync(file_) != 0) fail_with_reason("written");
  if (::close(std::exchange(file_, -1)) != 0) fail_with_reason("written");
}

void UnfinishedFile::publish() {
  if (std::rename(path_.c_str(), final_path_.c_str()) != 0) fail_with_reason("renamed");
  path_.clear();
}

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

void IndexedDatasetWriter::finish() {
  const auto sequences = static_cast<int64_t>(lengths_.size());
  require<UsageError>(open_ == 0 && bounds_.back() == sequences,
                      "'{}': sequence {} is in no document", idx_.final_path(),
                      open_ == 0 ? sequences - 1 : sequences);
  flush();
  write_index();
  bin_.sync();
  idx_.sync();
  // Between these steps the old index must not stand beside the new numbers.
  ::unlink(idx_.final_path().c_str());
  bin_.publish();
  idx_.publish();
  sync_folder_of(idx_.final_path());
}

}  // namespace lockstep
