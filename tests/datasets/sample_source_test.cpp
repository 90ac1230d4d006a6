#include "lockstep/datasets/sample_source.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <filesystem>
#include <map>
#include <numeric>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/datasets/blend.h"
#include "lockstep/datasets/document_list.h"
#include "lockstep/datasets/indexed_dataset_writer.h"
#include "lockstep/datasets/sample_index.h"
#include "lockstep/datasets/text_dataset.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::TemporaryFolder;
using testing::throws_with;
using Ids = std::vector<int64_t>;

constexpr int64_t kLength = 4;
constexpr int64_t kVocabulary = 60000;

Ids sample_of(SampleSource& source, int64_t sample, int64_t length = kLength) {
  Ids ids(static_cast<size_t>(length + 1));
  source.read(sample, ids);
  return ids;
}

std::string write_dataset(const std::string& prefix, const std::vector<Ids>& documents,
                          TokenType type = TokenType::uint16) {
  IndexedDatasetWriter writer(prefix, type);
  for (const Ids& document : documents) {
    writer.append(document);
    writer.end_sequence();
    writer.end_document();
  }
  writer.finish();
  return prefix;
}

/// `count` documents of at least `length` tokens. The tokens count up from `first`.
std::vector<Ids> documents(int64_t count, int64_t length, int64_t first = 0) {
  std::vector<Ids> result;
  for (int64_t d = 0; d < count; ++d) {
    Ids ids(static_cast<size_t>(length + d % 3));
    std::iota(ids.begin(), ids.end(), first);
    first += static_cast<int64_t>(ids.size());
    result.push_back(std::move(ids));
  }
  return result;
}

class SampleSourceTest : public ::testing::Test {
 protected:
  std::string write(const std::string& name, const std::vector<Ids>& documents) const {
    return write_dataset(folder_.path() / name, documents);
  }

  SampleSources open(const std::vector<std::string>& paths, const std::string& split = "1,0",
                     uint64_t seed = 1234) const {
    DataConfig config;
    config.path = paths;
    config.split = split;
    config.cache_path = cache_;
    if (!blend_.empty()) config.blend = blend_;
    return open_samples(config, kVocabulary, kLength, seed);
  }

  TemporaryFolder folder_;
  std::string cache_ = folder_.path() / "indices";
  std::string blend_;
};

TEST_F(SampleSourceTest, TextFilesAreReadAsBefore) {
  std::string text;
  for (int i = 0; i < 200; ++i) text += std::to_string(i);
  const std::string path = folder_.write("text", text);
  const SampleSources sources = open({path}, "90,10", 7);
  DataConfig config;
  config.path = {path};
  config.split = "90,10";
  const TextSplit split = read_text(config);
  const SampleOrder order(split.training.size(), kLength, 7);
  for (int64_t k = 0; k < 500; ++k) {
    Ids expected(kLength + 1);
    split.training.read(order.start_of(k), expected);
    ASSERT_EQ(sample_of(*sources.training, k), expected);
  }
  EXPECT_EQ(sources.training->size(), SampleSource::kEndless);
  ASSERT_EQ(sources.validation->size(), evaluation_windows(split.validation.size(), kLength));
  Ids expected(kLength + 1);
  split.validation.read(3 * kLength, expected);
  EXPECT_EQ(sample_of(*sources.validation, 3), expected);
}

TEST_F(SampleSourceTest, DocumentsAreReadInMegatronsOrder) {
  const std::vector<Ids> all = documents(12, 7);
  const SampleSources sources = open({write("set", all)});
  std::vector<int32_t> lengths;
  for (const Ids& document : all) lengths.push_back(static_cast<int32_t>(document.size()));
  const PackedArray<int32_t> packed(reinterpret_cast<const char*>(lengths.data()), 12);
  int64_t first = 0;
  for (uint32_t epoch = 0; epoch < 4; ++epoch) {
    const SampleIndex index =
        build_sample_index(packed, {0, 12}, {.seq_length = kLength, .seed = 1234 + epoch});
    Ids text;
    for (const int32_t document : index.documents) {
      const Ids& ids = all[static_cast<size_t>(document)];
      text.insert(text.end(), ids.begin(), ids.end());
    }
    for (const int64_t number : index.order) {
      const auto begin = text.begin() + number * kLength;
      ASSERT_EQ(sample_of(*sources.training, first++), Ids(begin, begin + kLength + 1));
    }
  }
  EXPECT_EQ(sources.validation->size(), 0);
}

TEST_F(SampleSourceTest, AnySampleCanBeReadAtAnyTime) {
  const std::string set = write("set", documents(30, 9));
  const SampleSources forward = open({set}), back = open({set});
  std::vector<Ids> samples;
  for (int64_t k = 0; k < 400; ++k) samples.push_back(sample_of(*forward.training, k));
  for (int64_t k = 399; k >= 0; --k)
    ASSERT_EQ(sample_of(*back.training, k), samples[static_cast<size_t>(k)]);
  EXPECT_EQ(std::set(samples.begin(), samples.begin() + 70).size(), 70u);
  EXPECT_NE(sample_of(*open({set}, "1,0", 1235).training, 0), samples[0]);
}

TEST_F(SampleSourceTest, SplitsTakeDocumentsAndTokensWhereThereAreTooFew) {
  const std::vector<Ids> all = documents(10, 5);
  const auto parts_of = [&](const std::vector<Ids>& documents, const std::vector<double>& shares) {
    const IndexedDataset dataset(write("split", documents));
    const auto parts = split_dataset(dataset.index(), shares);
    Ids numbers;
    for (const DatasetPart& part : parts)
      for (const int64_t n :
           {part.range.begin, part.range.end, part.skipped, part.cut, part.begin, part.end})
        numbers.push_back(n);
    return numbers;
  };
  EXPECT_EQ(parts_of(all, {0.8, 0.2}), (Ids{0, 8, 0, 0, 0, 47, 8, 10, 0, 0, 47, 59}));
  EXPECT_EQ(parts_of(all, {1, 0}), (Ids{0, 10, 0, 0, 0, 59, 10, 10, 0, 0, 59, 59}));
  EXPECT_EQ(parts_of({documents(1, 20)[0]}, {0.9, 0.1}),
            (Ids{0, 1, 0, 2, 0, 18, 0, 1, 18, 0, 18, 20}));
  EXPECT_EQ(parts_of({{}, {1, 2, 3}, {}, {4, 5, 6, 7, 8, 9, 10}}, {0.6, 0.4}),
            (Ids{0, 2, 0, 0, 0, 3, 2, 4, 0, 0, 3, 10}));

  const SampleSources cut = open({write("one", {documents(1, 1000)[0]})}, "75,20,5");
  std::set<int64_t> seen;
  for (int64_t k = 0; k < 187; ++k)
    for (const int64_t id : sample_of(*cut.training, k)) seen.insert(id);
  EXPECT_EQ(*seen.begin(), 0);
  EXPECT_EQ(*seen.rbegin(), 748);
  EXPECT_EQ(seen.size(), 749u);
  ASSERT_EQ(cut.validation->size(), 49);
  EXPECT_EQ(sample_of(*cut.validation, 0), (Ids{750, 751, 752, 753, 754}));
  EXPECT_EQ(sample_of(*cut.validation, 48), (Ids{942, 943, 944, 945, 946}));
}

TEST_F(SampleSourceTest, SeveralSetsAreOneSetOfDocuments) {
  const std::vector<Ids> a = documents(10, 8), b = documents(6, 5, 1000);
  const SampleSources two = open({write("a", a), write("b", b)}, "80,20");
  std::vector<Ids> together(a.begin(), a.begin() + 8);
  together.insert(together.end(), b.begin(), b.begin() + 5);
  const SampleSources one = open({write("c", together)});
  for (int64_t k = 0; k < 100; ++k)
    ASSERT_EQ(sample_of(*two.training, k), sample_of(*one.training, k));
  EXPECT_EQ(sample_of(*two.validation, 0)[0], a[8][0]);
  EXPECT_EQ(two.validation->size(), (8 + 2 + 8 + 0 + 5 + 2 - 1) / kLength);
  // If one of the files is a text, all of them become one text.
  const SampleSources mixed = open({write("a", a), folder_.write("t", "some words")}, "80,20");
  EXPECT_EQ(sample_of(*mixed.validation, 0)[0], 71);
}

TEST_F(SampleSourceTest, BlendsTakeTheirShares) {
  const std::string a = write("a", documents(40, 30)), b = write("b", documents(40, 30, 5000));
  blend_ = "0.3,0.7";
  const SampleSources blended = open({a, b}, "75,25");
  blend_.clear();
  const SampleSources sources[] = {open({a}, "75,25"), open({b}, "75,25")};
  const std::vector<double> weights = {0.3, 0.7};
  const auto order = blend(weights, 200'000);
  for (const int64_t k : {0, 1, 2, 65535, 65536, 65537, 199'999, 5, 131'072})
    EXPECT_EQ(sample_of(*blended.training, k),
              sample_of(*sources[order[static_cast<size_t>(k)].dataset].training,
                        order[static_cast<size_t>(k)].sample))
        << k;
  // The second set is drawn from more often than it has windows.
  const int64_t windows[] = {sources[0].validation->size(), sources[1].validation->size()};
  ASSERT_EQ(blended.validation->size(), windows[0] + windows[1]);
  for (int64_t k = 0; k < windows[0] + windows[1]; ++k) {
    const auto [dataset, sample] = order[static_cast<size_t>(k)];
    EXPECT_EQ(sample_of(*blended.validation, k),
              sample_of(*sources[dataset].validation, sample % windows[dataset]));
  }
}

TEST_F(SampleSourceTest, ABlendsValidationHasAllSetsHoweverShort) {
  const std::string a = write("a", documents(40, 30)), b = write("b", {Ids(100, 9), {7, 8}});
  EXPECT_EQ(open({b}, "50,50").validation->size(), 0);
  const int64_t windows = open({a}, "50,50").validation->size();
  blend_ = "0.5,0.5";
  for (const bool is_first : {true, false}) {
    const SampleSources sources = is_first ? open({b, a}, "50,50") : open({a, b}, "50,50");
    ASSERT_EQ(sources.validation->size(), windows + 1);
    for (int64_t k = 0; k < 10; ++k)
      EXPECT_EQ(sample_of(*sources.validation, k) == (Ids{7, 8, 7, 8, 7}),
                (k % 2 == 0) == is_first);
    EXPECT_EQ(sources.empty_validation, "");
  }
  // One token of `a`, and none of `b`.
  const SampleSources empty = open({a, b}, "1000,1");
  EXPECT_EQ(empty.validation->size(), 0);
  EXPECT_NE(empty.empty_validation.find("data.split: the validation part of '" + b + "' has no"),
            std::string::npos)
      << empty.empty_validation;
  EXPECT_EQ(sample_of(*empty.training, 1), Ids(kLength + 1, 9));
}

TEST_F(SampleSourceTest, ValidationAndTestHaveDataOfTheirOwn) {
  const std::string train = write("train", {Ids(100, 1)}), more = write("more", {Ids(50, 2)});
  const std::string text = folder_.write("text", std::string(60, '\x03'));
  const std::string test = write("test", {Ids(30, 4)});
  DataConfig config;
  config.path = {train};
  config.valid_path = {more, text};
  config.test_path = {test};
  for (const char* blend : {"", "2"}) {
    if (*blend) config.blend = blend;
    const SampleSources sources = open_samples(config, kVocabulary, kLength, 1234);
    for (int64_t sample = 0; sample < 30; ++sample)
      EXPECT_EQ(sample_of(*sources.training, sample), Ids(kLength + 1, 1));
    EXPECT_EQ(sources.validation->size(), 109 / kLength);
    EXPECT_EQ(sample_of(*sources.validation, 0), Ids(kLength + 1, 2));
    EXPECT_EQ(sample_of(*sources.validation, 108 / kLength - 1), Ids(kLength + 1, 3));
    ASSERT_NE(sources.test, nullptr);
    EXPECT_EQ(sample_of(*sources.test, 0), Ids(kLength + 1, 4));
  }
  config.test_path = {train + "none"};
  EXPECT_TRUE(throws_with<FileError>([&] { open_samples(config, kVocabulary, kLength, 1); },
                                     "data.test_path: '" + train + "none' cannot be read"));
  EXPECT_EQ(open({train}).test, nullptr);
}

TEST_F(SampleSourceTest, MadeUpSamplesCountUpAndNeedNoFile) {
  DataConfig config;
  config.mock = true;
  config.path = {"/nowhere/text"};
  const SampleSources sources = open_samples(config, 7, kLength, 1);
  const SampleSources other = open_samples(config, 7, kLength, 2);
  std::set<int64_t> starts;
  int differing = 0;
  for (int64_t sample = 0; sample < 200; ++sample) {
    const Ids ids = sample_of(*sources.training, sample);
    EXPECT_EQ(ids, sample_of(*sources.training, sample));
    for (size_t i = 1; i < ids.size(); ++i) EXPECT_EQ(ids[i], (ids[i - 1] + 1) % 7);
    starts.insert(ids[0]);
    differing += ids != sample_of(*other.training, sample);
    differing += ids != sample_of(*sources.validation, sample);
  }
  EXPECT_EQ(starts.size(), 7u);
  EXPECT_GT(differing, 300);
  EXPECT_EQ(sources.validation->size(), SampleSource::kEndless);
  EXPECT_EQ(sources.test, nullptr);
}

TEST_F(SampleSourceTest, NamesWhatIsWrong) {
  const std::string set = write("set", documents(3, 9)), text = folder_.write("text", "words");
  EXPECT_TRUE(throws_with<ConfigError>([&] { open({}); }, "data.path: is not set"));
  EXPECT_TRUE(throws_with<ConfigError>(
      [&] {
        open({write("short", {{1, 2}, {3, 4}})});
      },
      "short' have 4 tokens, allowed: more than model.seq_length (4)"));
  EXPECT_TRUE(throws_with<FileError>([&] { open({write("none", {{}})}); }, "none.bin' is empty"));
  blend_ = "1,2";
  EXPECT_TRUE(throws_with<ConfigError>([&] { open({set, text}); }, "text' is not"));
  blend_ = "1";
  EXPECT_TRUE(throws_with<ConfigError>(
      [&] {
        open({set, set});
      },
      "data.blend: found '1', allowed: a weight > 0 for each of "
      "the 2 paths"));
  blend_ = "1,0";
  EXPECT_TRUE(throws_with<ConfigError>([&] { open({set, set}); }, "data.blend: found '1,0'"));
  blend_.clear();
  const SampleSources outside = open({write("big", {Ids(20, kVocabulary)})});
  EXPECT_TRUE(throws_with<FileError>([&] { sample_of(*outside.training, 0); },
                                     "found id 60000, allowed: 0 to 59999 (model.vocab_size - 1)"));
  cache_ = text;
  EXPECT_TRUE(throws_with<FileError>([&] { sample_of(*open({set}).training, 0); },
                                     "cannot be created: Not a directory"));
}

TEST_F(SampleSourceTest, IndicesAreKeptBesideTheData) {
  const std::string set = write("set", documents(30, 9));
  DataConfig config;
  config.path = {set};
  const SampleSources sources = open_samples(config, kVocabulary, kLength, 1);
  for (int64_t k = 0; k < 300; ++k) sample_of(*sources.training, k);
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path() / "cache"))
    if (entry.path().filename() != ".lock") names.push_back(entry.path().filename());
  ASSERT_EQ(names.size(), 1u);  // a later epoch of a small set needs no file
  EXPECT_TRUE(names[0].starts_with("set-") && names[0].ends_with(".samples")) << names[0];
  // Another data set with the same name, another seed and another length have their own indices.
  write("set", documents(31, 9));
  const SampleSources again = open_samples(config, kVocabulary, kLength, 1);
  const SampleSources fresh = open({set}, "90,10", 1);
  for (int64_t k = 0; k < 70; ++k)
    ASSERT_EQ(sample_of(*again.training, k), sample_of(*fresh.training, k));
  const auto files = [&] {
    std::filesystem::directory_iterator all(folder_.path() / "cache");
    return std::distance(begin(all), end(all));
  };
  EXPECT_EQ(files(), 3);  // two indices and the lock
  sample_of(*open_samples(config, kVocabulary, kLength, 2).training, 0);
  sample_of(*open_samples(config, kVocabulary, kLength + 1, 2).training, 0, kLength + 1);
  EXPECT_EQ(files(), 5);
}

TEST_F(SampleSourceTest, RunsWithDifferentSplitsKeepEachOthersIndices) {
  const auto read_with_split = [&, set = write("set", documents(30, 9))](const char* split) {
    DataConfig config;
    config.path = {set};
    config.split = split;
    sample_of(*open_samples(config, kVocabulary, kLength, 1).training, 0);
  };
  const auto cached = [&] {
    std::map<std::string, std::pair<ino_t, std::string>> files;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path() / "cache")) {
      const std::string name = "cache/" + entry.path().filename().string();
      if (!name.ends_with(".samples")) continue;
      struct stat status = {};
      EXPECT_EQ(::stat(entry.path().c_str(), &status), 0);
      files[name] = {status.st_ino, folder_.read(name)};
    }
    return files;
  };
  read_with_split("90,10");
  const auto first = cached();
  read_with_split("50,50");
  const auto both = cached();
  ASSERT_EQ(first.size(), 1U);
  ASSERT_EQ(both.size(), 2U);
  const auto& [name, file] = *first.begin();
  EXPECT_EQ(both.at(name), file);
  EXPECT_NE(both.begin()->second.second, both.rbegin()->second.second);
  read_with_split("90,10");
  EXPECT_EQ(cached(), both);  // read, not written again
}

}  // namespace
}  // namespace lockstep
