#include "lockstep/training/data/token_batch.h"

#include <ATen/ATen.h>

#include "lockstep/core/check.h"

namespace lockstep {

TokenBatch make_token_batch(const std::string& text, const std::vector<int64_t>& starts,
                            int64_t seq_length, c10::Device device) {
  const auto samples = static_cast<int64_t>(starts.size());
  at::Tensor windows = at::empty({samples, seq_length + 1}, at::kLong);
  auto* id = windows.mutable_data_ptr<int64_t>();
  for (const int64_t start : starts) {
    require<UsageError>(
        start >= 0 && start + seq_length < static_cast<int64_t>(text.size()),
        "make_token_batch: a window of {} tokens at {}, allowed: inside the {} of the text",
        seq_length + 1, start, text.size());
    for (int64_t i = 0; i <= seq_length; ++i)
      *id++ = static_cast<unsigned char>(text[static_cast<size_t>(start + i)]);
  }
  windows = windows.to(device);
  return {windows.slice(1, 0, seq_length), windows.slice(1, 1)};
}

}  // namespace lockstep
