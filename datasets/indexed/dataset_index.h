#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "lockstep/datasets/token_type.h"

/// Megatron's `.idx` file. Needs no libtorch.
///
/// "MMIDIDX\0\0" (9 bytes) | version 1 (u64) | type code of the numbers (u8) | number of sequences
/// (u64) | number of document bounds, documents + 1 (u64) | length of each sequence (i32) | byte in
/// the `.bin` where each begins (i64) | document bounds: document d has the sequences bounds[d] ...
/// bounds[d + 1] - 1 (i64) | in multimodal sets, the mode of each sequence (i8). Little endian,
/// unaligned.
namespace lockstep {

/// Consecutive numbers at any address, in memory that this object does not own.
template <class T>
class PackedArray {
 public:
  PackedArray() = default;
  PackedArray(const char* data, int64_t size) : data_(data), size_(size) {}

  int64_t size() const { return size_; }
  T operator[](int64_t i) const {
    T value;
    std::memcpy(&value, data_ + i * static_cast<int64_t>(sizeof value), sizeof value);
    return value;
  }

 private:
  const char* data_ = nullptr;
  int64_t size_ = 0;
};

/// A valid index: bounds[0] = 0, the bounds do not descend, and the last is the number of
/// sequences; lengths are not negative, and the sequences follow each other in the `.bin` without
/// gap or overlap, from byte 0 on.
struct DatasetIndex {
  TokenType type = TokenType::uint8;
  PackedArray<int32_t> lengths;   ///< numbers
  PackedArray<int64_t> pointers;  ///< bytes
  PackedArray<int64_t> bounds;    ///< sequences
  PackedArray<int8_t> modes;      ///< empty unless the set is multimodal
  int64_t num_tokens = 0;

  int64_t num_sequences() const { return lengths.size(); }
  int64_t num_documents() const { return bounds.size() - 1; }
  /// The size that the `.bin` must have.
  int64_t bin_bytes() const { return num_tokens * token_type_bytes(type); }
};

inline constexpr std::string_view kIndexMagic("MMIDIDX\0\0", 9);
inline constexpr uint64_t kIndexVersion = 1;

/// Reads the bytes of an `.idx` file, which must outlive the result. Reads every number once and
/// allocates nothing. FileError with `path`, the byte, the field, what was found and what is
/// allowed, for a file that is truncated, too long, or not a valid DatasetIndex.
DatasetIndex parse_dataset_index(std::string_view bytes, const std::string& path);

}  // namespace lockstep
