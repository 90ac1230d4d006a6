#include "lockstep/datasets/dataset_summary.h"

#include <algorithm>
#include <string>
#include <vector>

#include "lockstep/datasets/crc32.h"

namespace lockstep {

DatasetSummary summarize(const IndexedDataset& dataset) {
  DatasetSummary summary;
  const DatasetIndex& index = dataset.index();
  for (int64_t i = 0; i < index.num_sequences(); ++i) {
    const int64_t length = index.lengths[i];
    summary.shortest = i == 0 ? length : std::min(summary.shortest, length);
    summary.longest = std::max(summary.longest, length);
  }
  constexpr int64_t kAtOnce = int64_t{1} << 17;
  const PackedTokens tokens = dataset.tokens();
  std::vector<int64_t> ids;
  for (int64_t start = 0; start < tokens.size; start += kAtOnce) {
    const int64_t count = std::min(tokens.size - start, kAtOnce);
    const std::string bytes = tokens.bytes(start, count);
    summary.crc32 = crc32(bytes, summary.crc32);
    if (!is_integer(index.type)) continue;
    ids.resize(static_cast<size_t>(count));
    PackedTokens{.data = bytes.data(), .type = index.type, .size = count}.read(0, ids);
    const auto [smallest, largest] = std::minmax_element(ids.begin(), ids.end());
    summary.smallest_id = start == 0 ? *smallest : std::min(summary.smallest_id, *smallest);
    summary.largest_id = start == 0 ? *largest : std::max(summary.largest_id, *largest);
  }
  return summary;
}

}  // namespace lockstep
