#include "lockstep/datasets/sample_index.h"

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "lockstep/core/config_rules.h"
#include "lockstep/core/error.h"
#include "lockstep/datasets/blend.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using Json = nlohmann::json;
using testing::throws_with;
using Starts = std::vector<SampleStart>;

/// Written by scripts/golden/sample_index.py from Megatron Core 0.16.1.
const Json& sample_index_golden() {
  static const Json json =
      Json::parse(std::ifstream(LOCKSTEP_SOURCE_DIR "/tests/datasets/sample_index_golden.json"));
  return json;
}

PackedArray<int32_t> packed(const std::vector<int32_t>& lengths) {
  return {reinterpret_cast<const char*>(lengths.data()), static_cast<int64_t>(lengths.size())};
}

Starts starts_of(const std::vector<int32_t>& lengths, const std::vector<int32_t>& documents,
                 const SampleIndexOptions& options) {
  return build_sample_starts(packed(lengths), documents, options);
}

TEST(SampleStarts, WalkThroughTheDocuments) {
  const std::vector<int32_t> lengths = {5, 3, 7};
  EXPECT_EQ(starts_of(lengths, {0, 1, 2}, {.seq_length = 4}),
            (Starts{{0, 0}, {0, 4}, {2, 0}, {2, 4}}));
  EXPECT_EQ(starts_of(lengths, {2, 0, 1}, {.seq_length = 4}),
            (Starts{{0, 0}, {0, 4}, {1, 1}, {2, 0}}));
  EXPECT_EQ(starts_of(lengths, {0, 1, 2}, {.seq_length = 4, .extra_tokens = 0}),
            (Starts{{0, 0}, {0, 4}, {1, 3}, {2, 4}}));
  EXPECT_EQ(starts_of(lengths, {0, 1, 2, 0, 1, 2}, {.seq_length = 4}),
            (Starts{{0, 0}, {0, 4}, {2, 0}, {2, 4}, {3, 1}, {4, 0}, {5, 1}, {5, 5}}));
  EXPECT_EQ(starts_of({10, 10}, {0, 1}, {.seq_length = 5}),
            (Starts{{0, 0}, {0, 5}, {1, 0}, {1, 5}}));
  EXPECT_EQ(starts_of({2, 2, 2, 2}, {0, 1, 2, 3}, {.seq_length = 4, .drop_last_partial = false}),
            (Starts{{0, 0}, {2, 0}, {3, 1}}));
}

TEST(NumpyShuffle, EqualsNumpys) {
  NumpyShuffle shuffle(1234);
  std::vector<int> eight(8), five(5);
  std::iota(eight.begin(), eight.end(), 0);
  std::iota(five.begin(), five.end(), 0);
  shuffle(std::span(eight));
  shuffle(std::span(five));
  EXPECT_EQ(eight, (std::vector{2, 1, 6, 0, 4, 5, 3, 7}));
  EXPECT_EQ(five, (std::vector{2, 0, 4, 3, 1}));
  for (const Json& test : sample_index_golden()["shuffles"]) {
    NumpyShuffle again(test["seed"].get<uint32_t>());
    for (const Json& result : test["results"]) {
      std::vector<int64_t> values(result.size());
      std::iota(values.begin(), values.end(), 0);
      again(std::span(values));
      EXPECT_EQ(values, result.get<std::vector<int64_t>>());
    }
  }
}

TEST(SampleIndex, EqualsMegatrons) {
  std::set<int64_t> epochs;
  for (const Json& test : sample_index_golden()["samples"]) {
    const auto lengths = test["lengths"].get<std::vector<int32_t>>();
    const SampleIndex index =
        build_sample_index(packed(lengths), {test["range"][0], test["range"][1]},
                           {.seq_length = test["seq_length"],
                            .seed = test["seed"],
                            .num_samples = test["num_samples"],
                            .extra_tokens = test["extra_tokens"],
                            .drop_last_partial = test["drop_last"]});
    EXPECT_EQ(index.documents, test["documents"].get<std::vector<int32_t>>()) << test;
    EXPECT_EQ(index.order, test["order"].get<std::vector<int64_t>>()) << test;
    Json starts = Json::array();
    for (const SampleStart& start : index.starts) starts.push_back({start.document, start.offset});
    EXPECT_EQ(starts, test["starts"]) << test;
    EXPECT_EQ(index.num_samples() + 1, static_cast<int64_t>(index.starts.size()));
    epochs.insert(index.epochs);
  }
  EXPECT_GT(epochs.size(), 4u);
}

TEST(SampleIndex, DocumentsOfTwoEpochs) {
  const std::vector<int32_t> lengths = {4, 4, 4};
  const SampleIndex index = build_sample_index(packed(lengths), {0, 3},
                                               {.seq_length = 4, .seed = 1234, .num_samples = 5});
  EXPECT_EQ(index.epochs, 2);
  EXPECT_EQ(index.documents, (std::vector<int32_t>{2, 1, 2, 0, 1, 0}));
}

TEST(SampleIndex, NamesWhatIsWrong) {
  const std::vector<int32_t> lengths = {4, 0, 3};
  const auto build = [&](DocumentRange range, const SampleIndexOptions& options) {
    return [=, &lengths] { build_sample_index(packed(lengths), range, options); };
  };
  EXPECT_TRUE(throws_with<UsageError>(build({0, 4}, {.seq_length = 2}), "inside 0 to 3"));
  EXPECT_TRUE(throws_with<UsageError>(build({1, 2}, {.seq_length = 2}), "have no tokens"));
  EXPECT_TRUE(throws_with<UsageError>(build({0, 3}, {.seq_length = 7}), "7 tokens, allowed: enou"));
  EXPECT_TRUE(throws_with<UsageError>(build({0, 3}, {.seq_length = 0}), "samples of 0 + 1 tokens"));
  EXPECT_TRUE(throws_with<UsageError>(build({0, 3}, {.seq_length = 2, .extra_tokens = 2}),
                                      "samples of 2 + 2 tokens"));
}

TEST(SplitDocuments, EqualsMegatrons) {
  for (const Json& test : sample_index_golden()["splits"]) {
    const auto ranges =
        split_documents(parse_split(test["split"].get<std::string>()), test["documents"]);
    for (size_t i = 0; i < ranges.size(); ++i) {
      const Json& expected = test["ranges"][i];
      if (expected.is_null())
        EXPECT_EQ(ranges[i].begin, ranges[i].end) << test;
      else
        EXPECT_EQ(Json({ranges[i].begin, ranges[i].end}), expected) << test;
    }
  }
  const std::vector<double> negative = {1, -1}, none = {0, 0};
  EXPECT_TRUE(throws_with<UsageError>([&] { split_documents(negative, 3); }, "found -1"));
  EXPECT_TRUE(throws_with<UsageError>([&] { split_documents(none, 3); }, "with the sum 1"));
}

Json datasets_of(const std::vector<BlendedSample>& samples) {
  Json datasets = Json::array();
  for (const BlendedSample& sample : samples) datasets.push_back(sample.dataset);
  return datasets;
}

Json samples_of(const std::vector<BlendedSample>& samples) {
  Json numbers = Json::array();
  for (const BlendedSample& sample : samples) numbers.push_back(sample.sample);
  return numbers;
}

TEST(Blend, EqualsMegatrons) {
  const auto by = [](const std::vector<double>& weights) { return blend(weights, 10); };
  EXPECT_EQ(datasets_of(by({.5, .5})), Json({0, 1, 0, 1, 0, 1, 0, 1, 0, 1}));
  EXPECT_EQ(datasets_of(by({.3, .7})), Json({1, 0, 1, 1, 0, 1, 1, 0, 1, 1}));
  EXPECT_EQ(samples_of(by({.3, .7})), Json({0, 0, 1, 2, 1, 3, 4, 2, 5, 6}));
  EXPECT_EQ(datasets_of(by({.5, .3, .2})), Json({0, 1, 2, 0, 1, 0, 2, 0, 1, 0}));
  EXPECT_EQ(datasets_of(by({.6, .3, .1})), Json({0, 1, 2, 0, 0, 1, 0, 0, 1, 0}));
  for (const Json& test : sample_index_golden()["blends"]) {
    const auto shares = normalize_weights(test["weights"].get<std::vector<double>>());
    EXPECT_EQ(shares, test["shares"].get<std::vector<double>>());
    const auto samples = blend(shares, static_cast<int64_t>(test["samples"].size()));
    EXPECT_EQ(datasets_of(samples), test["datasets"]) << test["weights"];
    EXPECT_EQ(samples_of(samples), test["samples"]) << test["weights"];
  }
}

TEST(Blend, OfAllSamples) {
  const auto of = [](const std::vector<int64_t>& sizes) { return datasets_of(blend_all(sizes)); };
  EXPECT_EQ(of({3, 2}), Json({0, 1, 0, 1, 0}));
  EXPECT_EQ(of({1, 2, 4}), Json({2, 1, 0, 2, 2, 1, 2}));
  EXPECT_EQ(of({0, 2, 0}), Json({1, 1}));
  for (const Json& test : sample_index_golden()["exhaustive"]) {
    const auto samples = blend_all(test["sizes"].get<std::vector<int64_t>>());
    EXPECT_EQ(datasets_of(samples), test["datasets"]);
    EXPECT_EQ(samples_of(samples), test["samples"]);
  }
}

TEST(Blend, NamesWhatIsWrong) {
  const std::vector<double> none, negative = {1, -0.5}, zero = {0, 0};
  const std::vector<int64_t> negative_size = {3, -1};
  EXPECT_TRUE(throws_with<UsageError>([&] { blend(none, 1); }, "found 0 data sets"));
  EXPECT_TRUE(
      throws_with<UsageError>([&] { normalize_weights(negative); }, "found weights [1, -0.5]"));
  EXPECT_TRUE(throws_with<UsageError>([&] { normalize_weights(zero); }, "with a sum > 0"));
  EXPECT_TRUE(throws_with<UsageError>([&] { blend_all(negative_size); }, "of -1 samples"));
  const std::vector<double> many(32768, 1.0);
  EXPECT_TRUE(throws_with<UsageError>([&] { blend(many, 1); }, "allowed: 1 to 32767"));
}

}  // namespace
}  // namespace lockstep
