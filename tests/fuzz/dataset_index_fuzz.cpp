// Megatron's .idx. An accepted one is read and sampled.

#include <numeric>

#include "lockstep/core/error.h"
#include "lockstep/datasets/dataset_index.h"
#include "lockstep/datasets/document_list.h"
#include "lockstep/tests/fuzz/fuzz.h"

int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  try {
    const DatasetIndex index = parse_dataset_index(fuzz::text_of(data, size), "input");
    int64_t tokens = 0;
    for (int64_t i = 0; i < index.num_sequences(); ++i) tokens += index.lengths[i];
    fuzz::check(tokens == index.num_tokens, "the lengths add up to the tokens");
    fuzz::check(index.bounds[index.num_documents()] == index.num_sequences(), "the last bound");
    const double shares[] = {0.9, 0.09, 0.01};
    const auto parts = split_dataset(index, shares);
    fuzz::check(parts[0].begin == 0 && parts[0].end == parts[1].begin &&
                    parts[1].end <= index.num_tokens && parts[1].begin <= parts[1].end,
                "parts lie one after another");
    if (index.num_tokens == 0 || index.num_tokens > 4096 || index.num_sequences() > 4096) return 0;
    const SampleIndex samples =
        build_sample_index(index.lengths, {0, index.num_sequences()}, {.seq_length = 3});
    for (const SampleStart& start : samples.starts)
      fuzz::check(
          start.offset <= index.lengths[samples.documents[static_cast<size_t>(start.document)]],
          "samples begin in their documents");
  } catch (const FileError&) {
  } catch (const UsageError&) {
  }
  return 0;
}
