#pragma once

#include <array>
#include <cstdint>
#include <string_view>

/// Counter-based random numbers: each is a pure function of a key and a position, so the value of
/// an element does not depend on the layout, on the order of calls or on the number of threads.
namespace lockstep {

/// One block of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

/// A stream of random numbers, one for each position 0 ... 2^64 - 1.
class CounterStream {
 public:
  /// The stream of `seed` and a name, such as a parameter's global name.
  CounterStream(uint64_t seed, std::string_view name);

  /// Uniform over all 64-bit integers.
  uint64_t bits(uint64_t position) const;

  /// Normals with mean 0 and standard deviation 1, for the positions 2k and 2k + 1.
  std::array<double, 2> normal_pair(uint64_t k) const;

 private:
  std::array<uint32_t, 4> block(uint64_t position, uint32_t purpose) const;

  std::array<uint32_t, 2> key_;
};

/// A random permutation of 0 ... size - 1 that needs no table: a Feistel network over the smallest
/// even number of bits that holds `size`, walked until the value is in range.
class Permutation {
 public:
  /// `size` >= 1.
  Permutation(uint64_t size, uint64_t seed, std::string_view name);

  /// Where position `index` (< size) goes.
  uint64_t operator()(uint64_t index) const;

 private:
  uint64_t size_;
  int half_bits_;
  CounterStream stream_;
};

}  // namespace lockstep
