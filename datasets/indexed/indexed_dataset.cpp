#include "lockstep/datasets/indexed_dataset.h"

#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/datasets/file_bytes.h"

namespace lockstep {

struct IndexedDataset::Files {
  explicit Files(const std::string& prefix) : idx(prefix + ".idx"), bin(prefix + ".bin") {}

  FileBytes idx;
  InputFile bin;
};

IndexedDataset::IndexedDataset(const std::string& prefix)
    : prefix_(prefix),
      files_(std::make_unique<const Files>(prefix)),
      index_(parse_dataset_index(files_->idx.bytes(), files_->idx.path())) {
  const auto& [idx, bin] = *files_;
  require<FileError>(bin.size() == index_.bin_bytes(),
                     "'{}': found {} bytes, allowed: {}, the {} numbers of {} that '{}' lists",
                     bin.path(), bin.size(), index_.bin_bytes(), index_.num_tokens,
                     token_type_name(index_.type), idx.path());
}

IndexedDataset::~IndexedDataset() = default;

std::string_view IndexedDataset::index_bytes() const { return files_->idx.bytes(); }

PackedTokens IndexedDataset::tokens() const {
  return {.data = nullptr, .type = index_.type, .size = index_.num_tokens, .file = &files_->bin};
}

PackedTokens IndexedDataset::sequence(int64_t sequence) const {
  require<UsageError>(sequence >= 0 && sequence < index_.num_sequences(),
                      "'{}': sequence: found {}, allowed: 0 to {}", files_->idx.path(), sequence,
                      index_.num_sequences() - 1);
  return {.data = nullptr,
          .type = index_.type,
          .size = index_.lengths[sequence],
          .file = &files_->bin,
          .offset = index_.pointers[sequence]};
}

bool is_dataset_prefix(const std::string& path) {
  const auto is_there = [](const std::string& name) {
    return kind_of_file(name) != FileKind::none;
  };
  const bool idx = is_there(path + ".idx"), bin = is_there(path + ".bin");
  return (idx && bin) || ((idx || bin) && !is_there(path));
}

}  // namespace lockstep
