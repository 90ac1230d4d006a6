#include "lockstep/training/data/indexed_dataset.h"

#include <filesystem>

#include "lockstep/core/check.h"

namespace lockstep {

IndexedDataset::IndexedDataset(const std::string& prefix)
    : prefix_(prefix),
      idx_(prefix + ".idx"),
      bin_(prefix + ".bin"),
      index_(parse_dataset_index(idx_.bytes(), idx_.path())) {
  const auto found = static_cast<int64_t>(bin_.bytes().size());
  require<FileError>(found == index_.bin_bytes(),
                     "'{}': found {} bytes, allowed: {}, the {} numbers of {} that '{}' lists",
                     bin_.path(), found, index_.bin_bytes(), index_.num_tokens,
                     token_type_name(index_.type), idx_.path());
}

PackedTokens IndexedDataset::tokens() const {
  return {bin_.bytes().data(), index_.type, index_.num_tokens};
}

PackedTokens IndexedDataset::sequence(int64_t sequence) const {
  require<UsageError>(sequence >= 0 && sequence < index_.num_sequences(),
                      "'{}': sequence: found {}, allowed: 0 to {}", idx_.path(), sequence,
                      index_.num_sequences() - 1);
  return {bin_.bytes().data() + index_.pointers[sequence], index_.type, index_.lengths[sequence]};
}

bool is_dataset_prefix(const std::string& path) {
  namespace fs = std::filesystem;
  const bool idx = fs::exists(path + ".idx"), bin = fs::exists(path + ".bin");
  return (idx && bin) || ((idx || bin) && !fs::exists(path));
}

}  // namespace lockstep
