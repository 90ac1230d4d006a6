#include "lockstep/datasets/merge_datasets.h"

#include <algorithm>
#include <filesystem>
#include <memory>

#include "lockstep/core/check.h"
#include "lockstep/datasets/indexed_dataset.h"
#include "lockstep/datasets/indexed_dataset_writer.h"

namespace lockstep {
namespace {

constexpr int64_t kNumbersAtOnce = int64_t{1} << 17;

bool has_modes(const IndexedDataset& dataset) { return dataset.index().modes.size() > 0; }

void check_merge(const IndexedDataset& dataset, const IndexedDataset& first,
                 const std::string& output) {
  const auto type = [](const IndexedDataset& set) { return token_type_name(set.index().type); };
  require<FileError>(dataset.index().type == first.index().type,
                     "'{}.idx': found numbers of {}, allowed: {}, which '{}.idx' has",
                     dataset.prefix(), type(dataset), type(first), first.prefix());
  const auto modes = [](const IndexedDataset& set) { return has_modes(set) ? "modes" : "none"; };
  require<FileError>(has_modes(dataset) == has_modes(first),
                     "'{}.idx': modes of the sequences: found {}, allowed: {}, as '{}.idx' has",
                     dataset.prefix(), modes(dataset), modes(first), first.prefix());
  std::error_code none;
  require<ConfigError>(
      !std::filesystem::equivalent(dataset.prefix() + ".idx", output + ".idx", none),
      "--output: found '{}', which is one of the inputs, allowed: another prefix", output);
}

/// Appends `count` numbers from `begin` on to the sequence that is being written.
void copy_numbers(const PackedTokens& tokens, int64_t begin, int64_t count,
                  IndexedDatasetWriter& writer) {
  while (count > 0) {
    const int64_t now = std::min(count, kNumbersAtOnce);
    writer.append_packed(tokens.bytes(begin, now));
    begin += now;
    count -= now;
  }
}

void append_dataset(const IndexedDataset& dataset, IndexedDatasetWriter& writer) {
  const DatasetIndex& index = dataset.index();
  const PackedTokens tokens = dataset.tokens();
  const int64_t bytes = token_type_bytes(index.type);
  for (int64_t document = 0; document < index.num_documents(); ++document) {
    for (int64_t s = index.bounds[document]; s < index.bounds[document + 1]; ++s) {
      copy_numbers(tokens, index.pointers[s] / bytes, index.lengths[s], writer);
      writer.end_sequence(has_modes(dataset) ? index.modes[s] : int8_t{0});
    }
    writer.end_document();
  }
}

}  // namespace

MergedDatasets merge_datasets(const std::vector<std::string>& inputs, const std::string& output) {
  const auto first = std::make_unique<const IndexedDataset>(inputs.at(0));
  for (const std::string& input : inputs) check_merge(IndexedDataset(input), *first, output);
  IndexedDatasetWriter writer(output, first->index().type, has_modes(*first));
  MergedDatasets merged;
  for (const std::string& input : inputs) {
    const IndexedDataset dataset(input);
    append_dataset(dataset, writer);
    merged.documents += dataset.index().num_documents();
    merged.sequences += dataset.index().num_sequences();
    merged.tokens += dataset.index().num_tokens;
  }
  writer.finish();
  return merged;
}

}  // namespace lockstep
