#include "lockstep/datasets/text_source.h"

namespace lockstep {

void WindowSource::read(int64_t sample, std::span<int64_t> out) {
  text_.read(sample * seq_length_, out);
}

void TextSource::read(int64_t sample, std::span<int64_t> out) {
  text_.read(order_.start_of(sample), out);
}

}  // namespace lockstep
