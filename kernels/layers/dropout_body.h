#pragma once

// Internal: dropout for the elements that share a Philox block. No libtorch here, see adamw_loop.h.

#include <cstdint>

#include "lockstep/kernels/dropout_rows.h"

namespace lockstep::kernels {

struct PhiloxBlock {
  uint32_t words[4];
};

/// The part of the counter that the blocks of a row share.
struct RowCounter {
  uint32_t position, sample, rest;
};

template <class T>
LOCKSTEP_LANE RowCounter counter_of(const DropoutRows<T>& a, int64_t row) {
  const int64_t place = a.position.index(row);
  const int64_t sample =
      a.sample.index(row) + (a.sample_on_device ? *a.sample_on_device : a.sample.first);
  const int64_t lane = a.lane.first + a.lane.index(row);
  return {static_cast<uint32_t>(a.positions ? a.positions[place] : a.position.first + place),
          static_cast<uint32_t>(sample),
          static_cast<uint32_t>(static_cast<uint64_t>(sample) >> 32 << 16) +
              static_cast<uint32_t>(lane)};
}

/// Philox4x32-10 of block `block` of a row.
LOCKSTEP_LANE PhiloxBlock philox_block(uint32_t block, RowCounter row, uint32_t k0, uint32_t k1) {
  uint32_t c0 = block, c1 = row.position, c2 = row.sample, c3 = row.rest;
#ifndef __CUDACC__  // nvcc unrolls it by itself
#pragma GCC unroll 10
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c0, b = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(b);
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

/// The result for `x` with the random word `word`.
template <bool kAdds, class T>
LOCKSTEP_LANE T dropped(const DropoutRows<T>& a, T x, T residual, uint32_t word) {
  using W = Wide<T>;
  // Multiply by 0, so that a value that is not finite stays visible.
  const W kept = widen(x) * static_cast<W>(word < a.threshold ? 0 : 1) * a.scale;
  T result;
  narrow(kept, result);
  if constexpr (kAdds) narrow(sum_of_rounded(widen(residual), widen(result)), result);
  return result;
}

}  // namespace lockstep::kernels
