#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

/// How token ids are stored in a file: packed numbers, little endian. Needs no libtorch.
namespace lockstep {

class InputFile;

/// The type of a number; the values are the codes of Megatron's `.idx`.
enum class TokenType : uint8_t {
  uint8 = 1,
  int8 = 2,
  int16 = 3,
  int32 = 4,
  int64 = 5,
  float64 = 6,
  float32 = 7,
  uint16 = 8,
};

/// Whether `code` is one of the codes above.
bool is_token_type(uint8_t code);

/// "uint16"
std::string_view token_type_name(TokenType type);

/// Whether numbers of the type can be token ids.
bool is_integer(TokenType type);

/// Bytes of one number.
int64_t token_type_bytes(TokenType type);

/// The type that Megatron uses for a vocabulary: uint16 below 65500 ids, otherwise int32.
TokenType token_type_of_vocabulary(int64_t vocabulary_size);

/// Packed numbers that this object does not own, in memory or in an open file.
struct PackedTokens {
  const char* data = nullptr;  ///< in memory
  TokenType type = TokenType::uint8;
  int64_t size = 0;                 ///< numbers
  const InputFile* file = nullptr;  ///< instead of `data`
  int64_t offset = 0;               ///< bytes: where they begin in `file`

  /// Reads numbers start ... start + out.size() - 1, which must exist. UsageError for types that
  /// are not integers; FileError as for InputFile::read_at().
  void read(int64_t start, std::span<int64_t> out) const;

  /// The bytes of `count` numbers from `start` on. FileError likewise.
  std::string bytes(int64_t start, int64_t count) const;

  /// Numbers begin ... end - 1 of these.
  PackedTokens part(int64_t begin, int64_t end) const;
};

/// Appends `ids` to `packed`. UsageError names an id that the type cannot hold, or a type that is
/// not an integer type.
void pack_tokens(std::span<const int64_t> ids, TokenType type, std::string& packed);

}  // namespace lockstep
