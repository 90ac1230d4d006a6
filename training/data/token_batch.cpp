#include "lockstep/training/data/token_batch.h"

#include <ATen/ATen.h>

namespace lockstep {

TokenBatch make_token_batch(const TokenSequence& text, const std::vector<int64_t>& starts,
                            int64_t seq_length, c10::Device device) {
  const auto samples = static_cast<int64_t>(starts.size());
  at::Tensor windows = at::empty({samples, seq_length + 1}, at::kLong);
  auto* ids = windows.mutable_data_ptr<int64_t>();
  for (const int64_t start : starts) {
    text.read(start, {ids, static_cast<size_t>(seq_length + 1)});
    ids += seq_length + 1;
  }
  windows = windows.to(device);
  return {windows.slice(1, 0, seq_length), windows.slice(1, 1)};
}

}  // namespace lockstep
