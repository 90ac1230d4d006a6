#include "lockstep/core/philox.h"

#include <bit>
#include <cmath>
#include <numbers>

#include "lockstep/core/text_digest.h"

namespace lockstep {
namespace {

constexpr uint32_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
constexpr uint32_t kBitsPurpose = 0, kNormalPurpose = 1;

/// FNV-1a of the name, mixed with the seed by the finalizer of SplitMix64.
uint64_t hash(uint64_t seed, std::string_view name) {
  uint64_t h = text_digest(name);
  h ^= seed * 0x9E3779B97F4A7C15;
  h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9;
  h = (h ^ (h >> 27)) * 0x94D049BB133111EB;
  return h ^ (h >> 31);
}

uint64_t join(uint32_t low, uint32_t high) { return uint64_t{high} << 32 | low; }

}  // namespace

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{kMultiplier0} * counter[0];
    const uint64_t b = uint64_t{kMultiplier1} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key = {key[0] + kWeyl0, key[1] + kWeyl1};
  }
  return counter;
}

CounterStream::CounterStream(uint64_t seed, std::string_view name) {
  const uint64_t key = hash(seed, name);
  key_ = {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

std::array<uint32_t, 4> CounterStream::block(uint64_t position, uint32_t purpose) const {
  return philox4x32(
      {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), purpose, 0}, key_);
}

uint64_t CounterStream::bits(uint64_t position) const {
  const auto words = block(position, kBitsPurpose);
  return join(words[0], words[1]);
}

std::array<double, 2> CounterStream::normal_pair(uint64_t k) const {
  const auto words = block(k, kNormalPurpose);
  // Box-Muller. The radius takes a uniform in (0, 1], so that its logarithm is finite.
  const double uniform = static_cast<double>((join(words[0], words[1]) >> 11) + 1) * 0x1p-53;
  const double angle =
      static_cast<double>(join(words[2], words[3]) >> 11) * 0x1p-53 * 2 * std::numbers::pi;
  const double radius = std::sqrt(-2 * std::log(uniform));
  return {radius * std::cos(angle), radius * std::sin(angle)};
}

Permutation::Permutation(uint64_t size, uint64_t seed, std::string_view name)
    : size_(size), half_bits_((std::bit_width(size - 1) + 1) / 2), stream_(seed, name) {}

uint64_t Permutation::operator()(uint64_t index) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  do {
    uint64_t left = index >> half_bits_, right = index & mask;
    for (uint64_t round = 0; round < 4; ++round) {
      const uint64_t mixed = left ^ (stream_.bits(right << 2 | round) & mask);
      left = right;
      right = mixed;
    }
    index = left << half_bits_ | right;
  } while (index >= size_);
  return index;
}

}  // namespace lockstep
