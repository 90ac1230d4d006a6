#include "lockstep/datasets/text_source.h"

namespace lockstep {

void WindowSource::read(int64_t sample, std::span<int64_t> out) {
  if (!repeats_) return text_.read(sample * seq_length_, out);
  const auto length = static_cast<size_t>(text_.size());
  text_.read(0, out.first(length));
  for (size_t i = length; i < out.size(); ++i) out[i] = out[i - length];
}

void TextSource::read(int64_t sample, std::span<int64_t> out) {
  text_.read(order_.start_of(sample), out);
}

}  // namespace lockstep
