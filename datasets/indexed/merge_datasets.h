#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

/// The result of a merge.
struct MergedDatasets {
  int64_t documents = 0;
  int64_t sequences = 0;
  int64_t tokens = 0;
};

/// Writes the documents of the data sets `inputs` (prefixes), one set after another, as the set
/// `output`: byte for byte what add_index() of megatron-core 0.16.1's IndexedDatasetBuilder makes
/// of them. The numbers are copied piece by piece, unread. The data set appears at the end, or not
/// at all. Needs no libtorch.
///
/// FileError names a data set that is missing or damaged, that has a different number type than the
/// first, or modes while the first has none, or a file that cannot be written. ConfigError if the
/// output is one of the inputs.
MergedDatasets merge_datasets(const std::vector<std::string>& inputs, const std::string& output);

}  // namespace lockstep
