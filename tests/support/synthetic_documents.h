#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/datasets/indexed_dataset_writer.h"

namespace lockstep::testing {

/// Writes a data set of 300 documents with 3 to 25 tokens, the last of which is 256, the end of a
/// document of the byte tokenizer. Returns `prefix`, its data.path.
inline std::string write_documents(const std::string& prefix) {
  IndexedDatasetWriter writer(prefix, TokenType::uint16);
  int64_t next = 0;
  for (int64_t document = 0; document < 300; ++document) {
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < 2 + document * 7 % 23; ++i) ids.push_back((next += 3) % 251);
    ids.push_back(256);
    writer.append(ids);
    writer.end_sequence();
    writer.end_document();
  }
  writer.finish();
  return prefix;
}

}  // namespace lockstep::testing
