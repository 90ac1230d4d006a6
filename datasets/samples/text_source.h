#pragma once

#include <utility>

#include "lockstep/datasets/sample_source.h"
#include "lockstep/datasets/text_dataset.h"

namespace lockstep {

/// Sample i consists of tokens i * seq_length ... of a text; a last partial window is dropped.
class WindowSource : public SampleSource {
 public:
  WindowSource(TokenSequence text, int64_t seq_length)
      : text_(std::move(text)), seq_length_(seq_length) {}

  int64_t size() const override { return evaluation_windows(text_.size(), seq_length_); }
  void read(int64_t sample, std::span<int64_t> out) override;

 private:
  TokenSequence text_;
  int64_t seq_length_;
};

/// Windows of a text in the order of SampleOrder.
class TextSource : public SampleSource {
 public:
  /// ConfigError as for SampleOrder.
  TextSource(TokenSequence text, int64_t seq_length, uint64_t seed)
      : text_(std::move(text)), order_(text_.size(), seq_length, seed) {}

  void read(int64_t sample, std::span<int64_t> out) override;

 private:
  TokenSequence text_;
  SampleOrder order_;
};

}  // namespace lockstep
