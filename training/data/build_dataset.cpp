#include "lockstep/training/data/build_dataset.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "lockstep/core/check.h"
#include "lockstep/training/data/crc32.h"
#include "lockstep/training/data/indexed_dataset_writer.h"

namespace lockstep {
namespace {

constexpr size_t kReadBytes = 1 << 20;

/// A file that is read from its front.
class InputFile {
 public:
  explicit InputFile(const std::string& path)
      : path_(path), file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (file_ < 0) fail_with_reason();
  }
  ~InputFile() { ::close(file_); }
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  /// Appends up to `bytes` bytes; how many came, 0 at the end.
  size_t read(std::string& to, size_t bytes) {
    const size_t before = to.size();
    to.resize(before + bytes);
    ssize_t count = -1;
    do count = ::read(file_, to.data() + before, bytes);
    while (count < 0 && errno == EINTR);
    if (count < 0) fail_with_reason();
    to.resize(before + static_cast<size_t>(count));
    return static_cast<size_t>(count);
  }

 private:
  [[noreturn]] void fail_with_reason() const {
    fail<FileError>("'{}' cannot be read: {}", path_, std::strerror(errno));
  }

  const std::string& path_;
  int file_;
};

int64_t bytes_of_files(const std::vector<std::string>& paths) {
  int64_t sum = 0;
  for (const std::string& path : paths) {
    struct stat status = {};
    const bool found = ::stat(path.c_str(), &status) == 0;
    require<FileError>(found, "'{}' cannot be read: {}", path, std::strerror(errno));
    sum += status.st_size;
  }
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
    InputFile file(path);
    text.clear();
    for (bool last = false; !last;) {
      // What no id could be given for yet is read again, so more must come than is there.
      const size_t count = file.read(text, std::max(kReadBytes, text.size()));
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
  DatasetSummary summary{.crc32 = crc32(dataset.bytes())};
  const DatasetIndex& index = dataset.index();
  for (int64_t i = 0; i < index.num_sequences(); ++i) {
    const int64_t length = index.lengths[i];
    summary.shortest = i == 0 ? length : std::min(summary.shortest, length);
    summary.longest = std::max(summary.longest, length);
  }
  if (!is_integer(index.type)) return summary;
  const PackedTokens tokens = dataset.tokens();
  std::vector<int64_t> ids(kReadBytes / sizeof(int64_t));
  for (int64_t start = 0; start < tokens.size; start += static_cast<int64_t>(ids.size())) {
    ids.resize(
        static_cast<size_t>(std::min(tokens.size - start, static_cast<int64_t>(ids.size()))));
    tokens.read(start, ids);
    const auto [smallest, largest] = std::minmax_element(ids.begin(), ids.end());
    summary.smallest_id = start == 0 ? *smallest : std::min(summary.smallest_id, *smallest);
    summary.largest_id = start == 0 ? *largest : std::max(summary.largest_id, *largest);
  }
  return summary;
}

}  // namespace lockstep
