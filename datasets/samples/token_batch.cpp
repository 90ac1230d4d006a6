#include "lockstep/datasets/token_batch.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/upload.h"

namespace lockstep {

TokenBatch make_token_batch(std::span<const int64_t> ids, int64_t seq_length, c10::Device device) {
  const auto count = static_cast<int64_t>(ids.size());
  require<UsageError>(seq_length > 0 && count % (seq_length + 1) == 0,
                      "make_token_batch: found {} ids, allowed: a multiple of {} + 1", count,
                      seq_length);
  at::Tensor windows = at::empty({count / (seq_length + 1), seq_length + 1}, at::kLong);
  std::copy(ids.begin(), ids.end(), windows.mutable_data_ptr<int64_t>());
  windows = upload(windows, device);
  return {windows.slice(1, 0, seq_length), windows.slice(1, 1)};
}

TokenBatch make_token_batch(const TokenSequence& text, const std::vector<int64_t>& starts,
                            int64_t seq_length, c10::Device device) {
  const auto length = static_cast<size_t>(seq_length + 1);
  std::vector<int64_t> ids(starts.size() * length);
  for (size_t i = 0; i < starts.size(); ++i)
    text.read(starts[i], std::span(ids).subspan(i * length, length));
  return make_token_batch(ids, seq_length, device);
}

}  // namespace lockstep
