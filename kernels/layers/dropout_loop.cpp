#include "lockstep/kernels/dropout_loop.h"

#include <algorithm>

#include "lockstep/core/vector_clones.h"
#include "lockstep/kernels/dropout_body.h"
#include "lockstep/kernels/vector_block.h"

namespace lockstep::kernels {
namespace {

constexpr int64_t kTileBlocks = 64;

/// The words of `count` blocks from `block` on, in the order of their elements.
LOCKSTEP_LANE void fill_words(uint32_t* words, int64_t block, int64_t count, RowCounter row,
                              const uint32_t* key) {
  const auto first = static_cast<uint32_t>(block);
  const uint32_t k0 = key[0], k1 = key[1];
  VectorBlock::each(count, [=](int64_t i) LOCKSTEP_LANE_LAMBDA {
    const PhiloxBlock made = philox_block(first + static_cast<uint32_t>(i), row, k0, k1);
    for (int k = 0; k < 4; ++k) words[4 * i + k] = made.words[k];
  });
}

template <bool kAdds, class T>
LOCKSTEP_LANE void run_dropout_row(const DropoutRows<T>& a, int64_t row) {
  const RowCounter counter = counter_of(a, row);
  const T* const x = a.x + row * a.width;
  const T* const residual = kAdds ? a.residual + row * a.width : x;
  T* const result = a.result + row * a.width;
  alignas(64) uint32_t words[4 * kTileBlocks];
  int64_t skipped = a.first_channel % 4;
  int64_t block = a.first_block();
  for (int64_t done = 0; done < a.width; block += kTileBlocks, skipped = 0) {
    const int64_t count = std::min(4 * kTileBlocks - skipped, a.width - done);
    fill_words(words, block, (skipped + count + 3) / 4, counter, a.key);
    const uint32_t* const own = words + skipped;
    VectorBlock::each(count, [=, &a](int64_t i) LOCKSTEP_LANE_LAMBDA {
      result[done + i] = dropped<kAdds>(a, x[done + i], residual[done + i], own[i]);
    });
    done += count;
  }
}

template <class T>
LOCKSTEP_LANE void run_dropout(const DropoutRows<T>& a, int64_t first, int64_t end) {
  for (int64_t row = first; row < end; ++row)
    a.residual ? run_dropout_row<true>(a, row) : run_dropout_row<false>(a, row);
}

}  // namespace

LOCKSTEP_VECTOR_CLONES
void dropout_loop(const DropoutRows<float>& a, int64_t first, int64_t end) {
  run_dropout(a, first, end);
}

LOCKSTEP_VECTOR_CLONES
void dropout_loop(const DropoutRows<double>& a, int64_t first, int64_t end) {
  run_dropout(a, first, end);
}

LOCKSTEP_VECTOR_CLONES
void dropout_loop(const DropoutRows<Bf16>& a, int64_t first, int64_t end) {
  run_dropout(a, first, end);
}

LOCKSTEP_VECTOR_CLONES
void dropout_loop(const DropoutRows<Fp16>& a, int64_t first, int64_t end) {
  run_dropout(a, first, end);
}

}  // namespace lockstep::kernels
