#include "lockstep/datasets/indexed_dataset.h"

#include "lockstep/core/check.h"

namespace lockstep {

IndexedDataset::IndexedDataset(const std::string& prefix)
    : prefix_(prefix),
      idx_(prefix + ".idx"),
      bin_(prefix + ".bin"),
      index_(parse_dataset_index(idx_.bytes(), idx_.path())) {
  require<FileError>(bin_.size() == index_.bin_bytes(),
                     "'{}': found {} bytes, allowed: {}, the {} numbers of {} that '{}' lists",
                     bin_.path(), bin_.size(), index_.bin_bytes(), index_.num_tokens,
                     token_type_name(index_.type), idx_.path());
}

PackedTokens IndexedDataset::tokens() const {
  return {.data = nullptr, .type = index_.type, .size = index_.num_tokens, .file = &bin_};
}

PackedTokens IndexedDataset::sequence(int64_t sequence) const {
  require<UsageError>(sequence >= 0 && sequence < index_.num_sequences(),
                      "'{}': sequence: found {}, allowed: 0 to {}", idx_.path(), sequence,
                      index_.num_sequences() - 1);
  return {.data = nullptr,
          .type = index_.type,
          .size = index_.lengths[sequence],
          .file = &bin_,
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
