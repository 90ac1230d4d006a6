#include "lockstep/datasets/mock_source.h"

#include "lockstep/core/philox.h"

namespace lockstep {

void MockSource::read(int64_t sample, std::span<int64_t> out) {
  const uint64_t bits = CounterStream(seed_, name_).bits(static_cast<uint64_t>(sample));
  auto id = static_cast<int64_t>(bits % static_cast<uint64_t>(vocabulary_size_));
  for (int64_t& place : out) {
    place = id;
    id = id + 1 < vocabulary_size_ ? id + 1 : 0;
  }
}

}  // namespace lockstep
