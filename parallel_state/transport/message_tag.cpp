#include "lockstep/parallel_state/message_tag.h"

namespace lockstep {

uint64_t mixed_tag(uint64_t identity, uint64_t bytes, int bits) {
  uint64_t hash = (identity ^ bytes * 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
  hash = (hash ^ hash >> 29) * 0x94D049BB133111EBu;
  return hash >> (64 - bits);
}

int message_tag(uint64_t identity, int64_t bytes) {
  return static_cast<int>(mixed_tag(identity, static_cast<uint64_t>(bytes), kTagBits));
}

}  // namespace lockstep
