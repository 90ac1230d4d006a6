#pragma once

// Internal: not installed, like core/base/check.h.

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "lockstep/core/check.h"
#include "lockstep/datasets/dataset_index.h"

namespace lockstep {

/// Takes one field after another from the front of a file. Each call throws FileError with the
/// path, the byte and the field if the file ends too early.
class FieldReader {
 public:
  FieldReader(std::string_view bytes, const std::string& path) : bytes_(bytes), path_(path) {}

  size_t offset() const { return offset_; }
  size_t bytes_left() const { return bytes_.size() - offset_; }

  std::string_view text(size_t length, std::string_view field) {
    require<FileError>(length <= bytes_left(),
                       "'{}': byte {}: {}: found the end of the file at byte {}, allowed: {} bytes",
                       path_, offset_, field, bytes_.size(), length);
    offset_ += length;
    return bytes_.substr(offset_ - length, length);
  }

  template <class T>
  T number(std::string_view field) {
    T value;
    std::memcpy(&value, text(sizeof value, field).data(), sizeof value);
    return value;
  }

  template <class T>
  PackedArray<T> array(uint64_t count, std::string_view field) {
    require<FileError>(count <= bytes_left() / sizeof(T),
                       "'{}': byte {}: {}: found the end of the file at byte {}, allowed: {} "
                       "numbers of {} bytes",
                       path_, offset_, field, bytes_.size(), count, sizeof(T));
    const auto size = static_cast<int64_t>(count);
    return {text(count * sizeof(T), field).data(), size};
  }

 private:
  std::string_view bytes_;
  const std::string& path_;
  size_t offset_ = 0;
};

}  // namespace lockstep
