#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

/// The header of the safetensors format: 8 bytes with the header's length (little endian), the
/// header as JSON, then the tensors' bytes without gaps. Needs no libtorch.
namespace lockstep {

struct SafetensorsEntry {
  std::string name;
  std::string dtype;  ///< "F64", "F32", "BF16", "F16", "I64", "I32", "I16", "I8", "U8", "BOOL"
  std::vector<int64_t> shape;
  int64_t begin = 0;  ///< bytes, counted from the end of the header; half-open range
  int64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  ///< in byte order
  std::map<std::string, std::string> metadata;
};

/// Bytes of one element. ConfigError for an unknown dtype.
int64_t safetensors_element_size(std::string_view dtype);

/// The header with its length in front, padded with spaces to a multiple of 8 bytes.
std::string format_safetensors_header(const SafetensorsHeader& header);

/// The header length given by the first 8 bytes of a file of `file_bytes` bytes. FileError, with
/// `path`, if it exceeds the file or 100 MB.
int64_t parse_safetensors_length(std::string_view first_bytes, int64_t file_bytes,
                                 const std::string& path);

/// Reads the JSON of a header whose tensors have `data_bytes` bytes. FileError, with `path` and the
/// tensor, for damaged JSON, a name that occurs twice, an unknown dtype, a size that does not match
/// the shape, and ranges that overlap, leave gaps or do not end at the end of the file.
SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t data_bytes,
                                           const std::string& path);

}  // namespace lockstep
