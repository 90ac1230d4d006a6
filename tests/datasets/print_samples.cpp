// Samples and indices of data sets, for megatron_data_test.py. SEQ_LENGTH SEED SAMPLES NUM_SAMPLES
// SPLIT BLEND PREFIX... prints, as JSON, the tokens of the first SAMPLES training samples and the
// indices that NUM_SAMPLES samples of the first data set need. BLEND may be empty. "marks" with the
// end-of-document id prints the marks of the samples in a list of lists on standard input.

#include <cstdio>
#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>

#include "lockstep/core/config_rules.h"
#include "lockstep/datasets/indexed_dataset.h"
#include "lockstep/datasets/sample_index.h"
#include "lockstep/datasets/sample_marks.h"
#include "lockstep/datasets/sample_source.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;

Json samples_of(SampleSource& source, int64_t count, int64_t seq_length) {
  Json samples = Json::array();
  std::vector<int64_t> ids(static_cast<size_t>(seq_length + 1));
  for (int64_t k = 0; k < count; ++k) {
    source.read(k, ids);
    samples.push_back(ids);
  }
  return samples;
}

Json indices_of(const std::string& prefix, const std::string& split,
                const SampleIndexOptions& options) {
  const IndexedDataset dataset(prefix);
  const DocumentRange range =
      split_documents(parse_split(split), dataset.index().num_sequences())[0];
  const SampleIndex index = build_sample_index(dataset.index().lengths, range, options);
  Json starts = Json::array();
  for (const SampleStart& start : index.starts) starts.push_back({start.document, start.offset});
  return {{"documents", index.documents}, {"starts", starts}, {"order", index.order}};
}

Json marks_of(const Json& samples, int64_t end_of_document) {
  Json all = Json::array();
  for (const Json& sample : samples) {
    const auto ids = sample.get<std::vector<int64_t>>();
    const SampleMarks marks = mark_documents(ids, {end_of_document, true, true, true});
    all.push_back(
        {{"documents", marks.documents}, {"positions", marks.positions}, {"loss", marks.loss}});
  }
  return all;
}

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  using namespace lockstep;
  if (argc == 3 && std::strcmp(argv[1], "marks") == 0) {
    std::puts(marks_of(nlohmann::json::parse(std::cin), std::atoll(argv[2])).dump().c_str());
    return 0;
  }
  if (argc < 8) return 2;
  const int64_t seq_length = std::atoll(argv[1]), samples = std::atoll(argv[3]);
  const auto seed = static_cast<uint64_t>(std::atoll(argv[2]));
  DataConfig config;
  config.path.assign(argv + 7, argv + argc);
  config.split = argv[5];
  if (*argv[6] != '\0') config.blend = argv[6];
  try {
    SampleSources sources = open_samples(config, int64_t(1) << 40, seq_length, seed);
    const Json json = {{"samples", samples_of(*sources.training, samples, seq_length)},
                       {"indices", indices_of(argv[7], argv[5],
                                              {.seq_length = seq_length,
                                               .seed = static_cast<uint32_t>(seed),
                                               .num_samples = std::atoll(argv[4])})}};
    std::puts(json.dump().c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
