#include "lockstep/training/data/token_type.h"

#include <array>
#include <bit>
#include <cstring>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

static_assert(std::endian::native == std::endian::little);

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
    const char* from = data + start * static_cast<int64_t>(sizeof number);
    for (int64_t& id : out) {
      std::memcpy(&number, from, sizeof number);
      from += sizeof number;
      id = number;
    }
  });
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
