#include "lockstep/datasets/dataset_index.h"

#include "lockstep/core/check.h"
#include "lockstep/datasets/field_reader.h"

namespace lockstep {
namespace {

template <class T>
size_t offset_of(size_t array, int64_t index) {
  return array + static_cast<size_t>(index) * sizeof(T);
}

/// Checks lengths and pointers, and counts the tokens.
void check_sequences(DatasetIndex& index, size_t lengths_at, size_t pointers_at,
                     const std::string& path) {
  const int64_t bytes = token_type_bytes(index.type);
  int64_t end = 0;
  for (int64_t i = 0; i < index.num_sequences(); ++i) {
    const int32_t length = index.lengths[i];
    const int64_t pointer = index.pointers[i];
    require<FileError>(length >= 0, "'{}': byte {}: length of sequence {}: found {}, allowed: >= 0",
                       path, offset_of<int32_t>(lengths_at, i), i, length);
    require<FileError>(pointer == end,
                       "'{}': byte {}: pointer of sequence {}: found {}, allowed: {}, where the "
                       "sequence before it ends",
                       path, offset_of<int64_t>(pointers_at, i), i, pointer, end);
    require<FileError>(!__builtin_add_overflow(end, length * bytes, &end),
                       "'{}': byte {}: length of sequence {}: the end does not fit into 64 bits",
                       path, offset_of<int32_t>(lengths_at, i), i);
  }
  index.num_tokens = end / bytes;
}

void check_documents(const DatasetIndex& index, size_t bounds_at, const std::string& path) {
  const int64_t count = index.bounds.size();
  int64_t last = 0;
  for (int64_t d = 0; d < count; ++d) {
    const int64_t bound = index.bounds[d];
    const int64_t low = d == 0 ? 0 : last, high = d == 0 ? 0 : index.num_sequences();
    require<FileError>(bound >= low && bound <= high,
                       "'{}': byte {}: document bound {}: found {}, allowed: {} to {}", path,
                       offset_of<int64_t>(bounds_at, d), d, bound, low, high);
    last = bound;
  }
  require<FileError>(last == index.num_sequences(),
                     "'{}': byte {}: the last document bound: found {}, allowed: {}, the number of "
                     "sequences",
                     path, offset_of<int64_t>(bounds_at, count - 1), last, index.num_sequences());
}

}  // namespace

DatasetIndex parse_dataset_index(std::string_view bytes, const std::string& path) {
  FieldReader reader(bytes, path);
  require<FileError>(reader.text(kIndexMagic.size(), "magic") == kIndexMagic,
                     "'{}': byte 0: magic: found other bytes, allowed: \"MMIDIDX\\0\\0\", with "
                     "which Megatron's index files begin",
                     path);
  size_t at = reader.offset();
  const auto version = reader.number<uint64_t>("version");
  require<FileError>(version == kIndexVersion, "'{}': byte {}: version: found {}, allowed: {}",
                     path, at, version, kIndexVersion);
  at = reader.offset();
  const auto code = reader.number<uint8_t>("dtype code");
  require<FileError>(is_token_type(code), "'{}': byte {}: dtype code: found {}, allowed: 1 to 8",
                     path, at, code);
  const auto sequences = reader.number<uint64_t>("number of sequences");
  at = reader.offset();
  const auto bounds = reader.number<uint64_t>("number of document bounds");
  require<FileError>(bounds >= 1,
                     "'{}': byte {}: number of document bounds: found 0, allowed: >= 1", path, at);

  DatasetIndex index;
  index.type = static_cast<TokenType>(code);
  const size_t lengths_at = reader.offset();
  index.lengths = reader.array<int32_t>(sequences, "lengths of the sequences");
  const size_t pointers_at = reader.offset();
  index.pointers = reader.array<int64_t>(sequences, "pointers of the sequences");
  const size_t bounds_at = reader.offset();
  index.bounds = reader.array<int64_t>(bounds, "document bounds");
  const size_t left = reader.bytes_left();
  require<FileError>(left == 0 || left == sequences,
                     "'{}': byte {}: found {} bytes after the document bounds, allowed: none, or "
                     "the modes of the {} sequences",
                     path, reader.offset(), left, sequences);
  if (left > 0) index.modes = reader.array<int8_t>(sequences, "modes of the sequences");
  check_sequences(index, lengths_at, pointers_at, path);
  check_documents(index, bounds_at, path);
  return index;
}

}  // namespace lockstep
