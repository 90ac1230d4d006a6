#pragma once

#include <string>
#include <utility>

#include "lockstep/datasets/sample_source.h"

namespace lockstep {

/// Samples that need no file, and that a model can learn from: each counts up by one from a
/// pseudo-random id, and continues with 0 after the last id of the vocabulary. They depend only on
/// `seed`, `name` and the number of the sample.
class MockSource : public SampleSource {
 public:
  MockSource(int64_t vocabulary_size, uint64_t seed, std::string name)
      : vocabulary_size_(vocabulary_size), seed_(seed), name_(std::move(name)) {}

  void read(int64_t sample, std::span<int64_t> out) override;

 private:
  int64_t vocabulary_size_;
  uint64_t seed_;
  std::string name_;
};

}  // namespace lockstep
