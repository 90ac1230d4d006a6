#pragma once

// Internal: queries, keys and values of a token, for any block policy. No libtorch here, see
// adamw_loop.h.

#include <cstdint>

#include "lockstep/kernels/float_storage.h"

namespace lockstep::kernels {

/// [sequence, batch, heads, channels], with contiguous channels; strides in elements.
template <class T>
struct HeadStrides {
  T* data;
  int64_t token, sample, head;

  LOCKSTEP_LANE T* at(int64_t t, int64_t b, int64_t h) const {
    return data + t * token + b * sample + h * head;
  }
};

/// See RotaryTensors. Of each group, `queries` query heads from `first_query` on are taken.
template <class T>
struct RotaryHeads {
  T* packed;
  HeadStrides<T> query, key, value;
  const Wide<T>*cos, *sin;
  const int64_t* positions;                 ///< null: the index in the sequence
  int64_t position_token, position_sample;  ///< strides of `positions`, in elements
  int64_t batch, groups, heads, first_query, queries, channels, rotated;

  LOCKSTEP_LANE int64_t slots() const { return groups * (heads + 2); }
};

/// Channels `from` -> `to`; the first `rotated` of them are rotated, or rotated back with `sign`
/// -1.
template <class Block, class T>
LOCKSTEP_LANE void rotate_head(Block block, const T* from, T* to, const Wide<T>* cos,
                               const Wide<T>* sin, Wide<T> sign, int64_t rotated,
                               int64_t channels) {
  using W = Wide<T>;
  const int64_t half = rotated / 2;
  block.map_two(
      half,
      [=](W first, W second, W c, W of_sin) LOCKSTEP_LANE_LAMBDA {
        const W s = sign * of_sin;
        return Two<W>{first * c - second * s, second * c + first * s};
      },
      to, to + half, from, from + half, cos, sin);
  block.copy(channels - rotated, to + rotated, from + rotated);
}

/// Head `slot` of the packed heads of a token of a sample: from `packed` or, with kBackward, the
/// gradient back into it, with zeros for query heads that are not taken.
template <bool kBackward, class Block, class T>
LOCKSTEP_LANE void rotary_slot(Block block, const RotaryHeads<T>& a, int64_t token, int64_t sample,
                               int32_t slot) {
  const auto of_group = static_cast<int32_t>(a.heads + 2);  // a division of 64 bits is slow
  const int32_t group = slot / of_group, head = slot % of_group;
  T* const packed = a.packed + ((token * a.batch + sample) * a.slots() + slot) * a.channels;
  const bool is_query = head < a.heads;
  if (is_query && (head < a.first_query || head >= a.first_query + a.queries)) {
    if constexpr (kBackward)
      block.each(a.channels, [=](int64_t i) LOCKSTEP_LANE_LAMBDA { packed[i] = T{}; });
    return;
  }
  T* const apart = is_query ? a.query.at(token, sample, group * a.queries + head - a.first_query)
                   : head == a.heads ? a.key.at(token, sample, group)
                                     : a.value.at(token, sample, group);
  const int64_t place =
      a.positions ? a.positions[token * a.position_token + sample * a.position_sample] : token;
  const int64_t rotated = head == a.heads + 1 ? 0 : a.rotated;
  const Wide<T>*const cos = a.cos + place * (a.rotated / 2), *const sin =
                                                                 a.sin + place * (a.rotated / 2);
  if constexpr (kBackward)
    rotate_head(block, apart, packed, cos, sin, Wide<T>(-1), rotated, a.channels);
  else
    rotate_head(block, packed, apart, cos, sin, Wide<T>(1), rotated, a.channels);
}

}  // namespace lockstep::kernels
