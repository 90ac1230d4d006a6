#include "lockstep/datasets/token_type.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"

namespace lockstep {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr size_t kBytesAtOnce = size_t{1} << 15;

struct TypeTraits {
  std::string_view name;
  int64_t bytes;
};

constexpr std::array<TypeTraits, 8> kTypes = {{{"uint8", 1},
                                               {"int8", 1},
                                               {"int16", 2},
                                               {"int32", 4},
                                               {"int64", 8},
                                               {"float64", 8},
                                               {"float32", 4},
                                               {"uint16", 2}}};

const TypeTraits& traits(TokenType type) { return kTypes.at(static_cast<size_t>(type) - 1); }

/// Calls `visitor` with a number of the integer type.
template <class Visitor>
void visit_integer(TokenType type, Visitor visitor) {
  switch (type) {
    case TokenType::uint8:
      return visitor(uint8_t());
    case TokenType::int8:
      return visitor(int8_t());
    case TokenType::int16:
      return visitor(int16_t());
    case TokenType::int32:
      return visitor(int32_t());
    case TokenType::int64:
      return visitor(int64_t());
    case TokenType::uint16:
      return visitor(uint16_t());
    default:
      fail<UsageError>("token ids: found numbers of {}, allowed: integers", token_type_name(type));
  }
}

/// Unpacks as many numbers as `ids` holds.
template <class Number>
void unpack(const char* from, std::span<int64_t> ids) {
  for (int64_t& id : ids) {
    Number number;
    std::memcpy(&number, from, sizeof number);
    from += sizeof number;
    id = number;
  }
}

}  // namespace

bool is_token_type(uint8_t code) { return code >= 1 && code <= kTypes.size(); }

std::string_view token_type_name(TokenType type) { return traits(type).name; }

bool is_integer(TokenType type) { return type != TokenType::float32 && type != TokenType::float64; }

int64_t token_type_bytes(TokenType type) { return traits(type).bytes; }

TokenType token_type_of_vocabulary(int64_t vocabulary_size) {
  constexpr int64_t kFewerThan = 65500;
  return vocabulary_size < kFewerThan ? TokenType::uint16 : TokenType::int32;
}

void PackedTokens::read(int64_t start, std::span<int64_t> out) const {
  visit_integer(type, [&](auto number) {
    const int64_t begin = start * static_cast<int64_t>(sizeof number);
    if (file == nullptr) return unpack<decltype(number)>(data + begin, out);
    std::array<char, kBytesAtOnce> buffer;
    int64_t at = offset + begin;
    while (!out.empty()) {
      const auto front = out.first(std::min(out.size(), buffer.size() / sizeof number));
      file->read_at(at, buffer.data(), front.size() * sizeof number);
      unpack<decltype(number)>(buffer.data(), front);
      at += static_cast<int64_t>(front.size() * sizeof number);
      out = out.subspan(front.size());
    }
  });
}

std::string PackedTokens::bytes(int64_t start, int64_t count) const {
  const int64_t begin = start * token_type_bytes(type);
  const auto length = static_cast<size_t>(count * token_type_bytes(type));
  if (file == nullptr) return {data + begin, length};
  std::string found(length, '\0');
  file->read_at(offset + begin, found.data(), length);
  return found;
}

PackedTokens PackedTokens::part(int64_t begin, int64_t end) const {
  const int64_t bytes_before = begin * token_type_bytes(type);
  return {.data = file == nullptr ? data + bytes_before : nullptr,
          .type = type,
          .size = end - begin,
          .file = file,
          .offset = offset + bytes_before};
}

void pack_tokens(std::span<const int64_t> ids, TokenType type, std::string& packed) {
  visit_integer(type, [&](auto number) {
    using Number = decltype(number);
    size_t end = packed.size();
    packed.resize(end + ids.size() * sizeof number);
    for (const int64_t id : ids) {
      require<UsageError>(std::in_range<Number>(id), "token id: found {}, allowed: what {} holds",
                          id, token_type_name(type));
      number = static_cast<Number>(id);
      std::memcpy(packed.data() + end, &number, sizeof number);
      end += sizeof number;
    }
  });
}

}  // namespace lockstep
