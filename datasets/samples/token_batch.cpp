#include "lockstep/datasets/token_batch.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/upload.h"
#include "lockstep/datasets/sample_marks.h"

namespace lockstep {

bool has_marks(std::span<const SampleMarks> marks) {
  return std::any_of(marks.begin(), marks.end(),
                     [](const SampleMarks& of) { return of != SampleMarks{}; });
}

namespace {

void check_marks(const SampleMarks& mark, size_t length) {
  require<UsageError>((mark.positions.empty() || mark.positions.size() == length) &&
                          (mark.loss.empty() || mark.loss.size() == length),
                      "make_marked_batch: found marks of {} positions and {} losses, allowed: {}",
                      mark.positions.size(), mark.loss.size(), length);
  require<UsageError>(mark.padding >= 0 && mark.padding <= static_cast<int64_t>(length),
                      "make_marked_batch: found {} tokens of padding, allowed: 0 to {}",
                      mark.padding, length);
}

}  // namespace

MarkedBatch make_marked_batch(std::span<const int64_t> ids, std::span<const SampleMarks> marks,
                              int64_t seq_length) {
  const auto samples = static_cast<int64_t>(marks.size());
  const auto [tokens, labels] = make_token_batch(ids, seq_length, c10::kCPU);
  require<UsageError>(tokens.size(0) == samples,
                      "make_marked_batch: found marks of {} samples, allowed: {}", samples,
                      tokens.size(0));
  MarkedBatch batch = {tokens, labels, at::ones({samples, seq_length}, at::kBool), {}, {}, {}};
  const auto length = static_cast<size_t>(seq_length);
  const std::vector<int64_t> whole = {seq_length};
  const std::vector<int64_t> counted = positions_in_documents(whole, seq_length);
  at::Tensor positions = at::empty({samples, seq_length}, at::kLong);
  const at::Tensor padding = at::zeros({samples, seq_length}, at::kBool);
  auto documents = std::make_shared<std::vector<std::vector<int64_t>>>();
  bool resets = false, bounds = false, fills = false;
  for (size_t i = 0; i < marks.size(); ++i) {
    const SampleMarks& mark = marks[i];
    check_marks(mark, length);
    resets = resets || !mark.positions.empty();
    bounds = bounds || !mark.documents.empty();
    fills = fills || mark.padding > 0;
    const std::vector<int64_t>& places = mark.positions.empty() ? counted : mark.positions;
    std::copy(places.begin(), places.end(), positions.mutable_data_ptr<int64_t>() + i * length);
    std::copy(mark.loss.begin(), mark.loss.end(), batch.loss.mutable_data_ptr<bool>() + i * length);
    padding[static_cast<int64_t>(i)].slice(0, seq_length - mark.padding).fill_(true);
    documents->push_back(mark.documents.empty() ? whole : mark.documents);
  }
  if (resets) batch.positions = positions.t().contiguous();
  if (fills) batch.padding = padding.t().contiguous();
  if (bounds) batch.documents = std::move(documents);
  return batch;
}

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
