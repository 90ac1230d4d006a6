#pragma once

// Internal: neighbouring elements that a CUDA thread loads and stores together, 16 bytes at a time.

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "lockstep/kernels/float_storage.h"

namespace lockstep::kernels {

constexpr int kPackBytes = 16;

/// The elements of T in a pack; operands of a wider type take several loads.
template <class T>
constexpr int kPackOf = kPackBytes / static_cast<int>(sizeof(T));

/// `kCount` elements from an address that is a multiple of 16 bytes. A single one may lie anywhere.
template <class T, int kCount>
struct ElementPack {
  static constexpr int kWords = kCount * static_cast<int>(sizeof(T)) / kPackBytes;
  static_assert(kWords * kPackBytes == kCount * static_cast<int>(sizeof(T)));
  union {
    uint4 words[kWords];
    T at[kCount];
  };

  LOCKSTEP_LANE ElementPack() {}
  LOCKSTEP_LANE explicit ElementPack(const T* from) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  LOCKSTEP_LANE void store(T* to) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<uint4*>(to)[i] = words[i];
  }
};

template <class T>
struct ElementPack<T, 1> {
  T at[1];

  LOCKSTEP_LANE ElementPack() {}
  LOCKSTEP_LANE explicit ElementPack(const T* from) : at{*from} {}
  LOCKSTEP_LANE void store(T* to) const { *to = at[0]; }
};

/// Whether packs of T fit: all addresses (null ones too) are multiples of 16 bytes, and so are the
/// distances in elements of T.
template <class T>
bool packs_fit(std::initializer_list<const void*> addresses,
               std::initializer_list<int64_t> distances) {
  for (const void* const address : addresses)
    if (reinterpret_cast<uintptr_t>(address) % kPackBytes != 0) return false;
  for (const int64_t distance : distances)
    if (distance % kPackOf<T> != 0) return false;
  return true;
}

/// Calls launch(pack) with the elements of a pack as a compile-time constant: 1 if packs do not
/// fit.
template <class T, class F>
void with_packs(bool fit, F launch) {
  if (fit) return launch(std::integral_constant<int, kPackOf<T>>());
  launch(std::integral_constant<int, 1>());
}

}  // namespace lockstep::kernels
