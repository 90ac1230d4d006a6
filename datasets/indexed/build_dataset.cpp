#include "lockstep/datasets/build_dataset.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/datasets/crc32.h"
#include "lockstep/datasets/indexed_dataset_writer.h"

namespace lockstep {
namespace {

constexpr size_t kReadBytes = 1 << 20;

/// Appends up to `bytes` bytes of the file; how many came, 0 at the end.
size_t append_bytes(InputFile& file, std::string& to, size_t bytes) {
  const size_t before = to.size();
  to.resize(before + bytes);
  const size_t count = file.read(to.data() + before, bytes);
  to.resize(before + count);
  return count;
}

int64_t bytes_of_files(const std::vector<std::string>& paths) {
  int64_t sum = 0;
  for (const std::string& path : paths) sum += size_of_file(path);
  return sum;
}

}  // namespace

BuildProgress build_dataset(const BuildDataset& build, Tokenizer& tokenizer,
                            const std::function<void(const BuildProgress&)>& progress) {
  BuildProgress done{.bytes_in_all = bytes_of_files(build.input)};
  IndexedDatasetWriter writer(build.output, token_type_of_vocabulary(tokenizer.vocabulary_size()));
  std::string text;
  std::vector<int64_t> ids;
  for (const std::string& path : build.input) {
    InputFile file(path, {.kinds = InputKinds::regular_or_pipe});
    text.clear();
    for (bool last = false; !last;) {
      // What no id could be given for yet is read again, so more must come than is there.
      const size_t count = append_bytes(file, text, std::max(kReadBytes, text.size()));
      last = count == 0;
      ids.clear();
      text.erase(0, tokenizer.encode_front(text, last, ids));
      if (last && build.append_eod) ids.push_back(tokenizer.end_of_document());
      writer.append(ids);
      done.bytes_read += static_cast<int64_t>(count);
      done.tokens += static_cast<int64_t>(ids.size());
      progress(done);
    }
    writer.end_sequence();
    writer.end_document();
    ++done.documents;
  }
  require<FileError>(done.tokens > 0, "'{}' is empty; allowed: files with text",
                     fmt::join(build.input, "', '"));
  writer.finish();
  progress(done);
  return done;
}

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
