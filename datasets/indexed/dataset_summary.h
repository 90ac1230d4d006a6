#pragma once

#include <cstdint>

#include "lockstep/datasets/indexed_dataset.h"

namespace lockstep {

/// What reading every number of a data set shows.
struct DatasetSummary {
  int64_t shortest = 0;  ///< numbers of a sequence
  int64_t longest = 0;
  int64_t smallest_id = 0;  ///< 0 if there are no numbers, or they are not integers
  int64_t largest_id = 0;
  uint32_t crc32 = 0;  ///< of the `.bin`
};

/// Reads the data set once. Needs no libtorch.
DatasetSummary summarize(const IndexedDataset& dataset);

}  // namespace lockstep
