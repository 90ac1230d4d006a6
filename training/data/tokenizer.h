#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// Token ids are the values of the bytes, 0 to 255.
class ByteTokenizer {
 public:
  static constexpr int64_t kVocabularySize = 256;

  static std::vector<int64_t> encode(std::string_view text);

  /// UsageError names an id that is no byte.
  static std::string decode(const std::vector<int64_t>& ids);
};

}  // namespace lockstep
