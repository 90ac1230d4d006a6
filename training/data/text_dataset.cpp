#include "lockstep/training/data/text_dataset.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>

#include "lockstep/core/check.h"
#include "lockstep/core/config_rules.h"
#include "lockstep/core/philox.h"

namespace lockstep {
namespace {

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  if (file) content << file.rdbuf();
  // A folder opens, and fails at the first read.
  require<FileError>(file.good() || (file.eof() && !file.bad()),
                     "data.path: '{}' cannot be read; allowed: plain text files", path);
  std::string text = std::move(content).str();
  require<FileError>(!text.empty(), "data.path: '{}' is empty", path);
  return text;
}

}  // namespace

TextSplit read_text(const DataConfig& config) {
  require<ConfigError>(!config.path.empty(),
                       "data.path: is not set, allowed: one or more plain text files");
  const std::vector<double> shares = parse_split(config.split);
  TextSplit split;
  for (const std::string& path : config.path) {
    const std::string text = read_file(path);
    const auto cut = [&](double share) {
      return static_cast<size_t>(std::llround(share * static_cast<double>(text.size())));
    };
    const size_t training = cut(shares[0]);
    const size_t validation = std::min(cut(shares[0] + shares[1]), text.size());
    split.training += text.substr(0, training);
    split.validation += text.substr(training, validation - training);
  }
  return split;
}

SampleOrder::SampleOrder(int64_t num_tokens, int64_t seq_length, uint64_t seed)
    : seq_length_(seq_length), seed_(seed) {
  require<ConfigError>(num_tokens > seq_length,
                       "data.path: the training text has {} tokens, allowed: more than "
                       "model.seq_length ({})",
                       num_tokens, seq_length);
  // One window less than fits leaves room for any start within a window.
  windows_ = std::max<int64_t>((num_tokens - seq_length) / seq_length, 1);
  shifts_ = std::min(num_tokens - windows_ * seq_length, seq_length);
}

int64_t SampleOrder::start_of(int64_t sample) const {
  const int64_t epoch = sample / windows_, index = sample % windows_;
  const std::string name = fmt::format("samples of epoch {}", epoch);
  const Permutation order(static_cast<uint64_t>(windows_), seed_, name);
  const auto window = static_cast<int64_t>(order(static_cast<uint64_t>(index)));
  const auto shift = static_cast<int64_t>(CounterStream(seed_, name + ", start").bits(0) %
                                          static_cast<uint64_t>(shifts_));
  return shift + window * seq_length_;
}

int64_t evaluation_windows(int64_t num_tokens, int64_t seq_length) {
  return num_tokens > 0 ? (num_tokens - 1) / seq_length : 0;
}

SampleRange microbatch_samples(int64_t consumed, int64_t micro_batch_size, int64_t microbatch,
                               int64_t rank, int64_t ranks) {
  const int64_t first = consumed + (microbatch * ranks + rank) * micro_batch_size;
  return {first, first + micro_batch_size};
}

}  // namespace lockstep
