#pragma once

#include <utility>

#include "lockstep/datasets/sample_source.h"
#include "lockstep/datasets/text_dataset.h"

namespace lockstep {

enum class ShortText {
  has_no_sample,
  is_repeated,  ///< until it fills one sample, as by Megatron Core, unless it is empty
};

/// Sample i consists of tokens i * seq_length ... of a text; a last partial window is dropped. A
/// text is short if it has no window.
class WindowSource : public SampleSource {
 public:
  WindowSource(TokenSequence text, int64_t seq_length,
               ShortText short_text = ShortText::has_no_sample)
      : text_(std::move(text)), seq_length_(seq_length) {
    const bool is_short = text_.size() > 0 && text_.size() <= seq_length;
    repeats_ = is_short && short_text == ShortText::is_repeated;
  }

  int64_t size() const override {
    return repeats_ ? 1 : evaluation_windows(text_.size(), seq_length_);
  }
  void read(int64_t sample, std::span<int64_t> out) override;

 private:
  TokenSequence text_;
  int64_t seq_length_;
  bool repeats_;
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
