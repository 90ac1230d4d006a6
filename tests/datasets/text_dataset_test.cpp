#include "lockstep/datasets/text_dataset.h"

#include <gtest/gtest.h>

#include <set>

#include "lockstep/core/error.h"
#include "lockstep/datasets/batch_sizes.h"
#include "lockstep/datasets/crc32.h"
#include "lockstep/datasets/indexed_dataset_writer.h"
#include "lockstep/datasets/tokenizer.h"
#include "lockstep/tests/support/compressed_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::TemporaryFolder;
using testing::throws_with;

std::vector<int64_t> ids_of(const TokenSequence& text) {
  std::vector<int64_t> ids(static_cast<size_t>(text.size()));
  text.read(0, ids);
  return ids;
}

std::string text_of(const TokenSequence& text) { return ByteTokenizer().decode(ids_of(text)); }

/// Writes a data set with one document for each list of ids. Returns its prefix.
std::string write_dataset(const TemporaryFolder& folder, const std::string& name,
                          const std::vector<std::vector<int64_t>>& documents,
                          TokenType type = TokenType::uint16) {
  IndexedDatasetWriter writer(folder.path() / name, type);
  for (const auto& document : documents) {
    writer.append(document);
    writer.end_sequence();
    writer.end_document();
  }
  writer.finish();
  return folder.path() / name;
}

TEST(ReadText, EachFileIsSplit) {
  const TemporaryFolder folder;
  DataConfig config;
  config.path = {folder.write("a", "0123456789"), folder.write("b", std::string("ab\0\xff", 4))};
  config.split = "50,30,20";
  const TextSplit split = read_text(config);
  EXPECT_EQ(text_of(split.training), "01234ab");
  EXPECT_EQ(text_of(split.validation), std::string("567\0", 4));
  config.split = "1,0";
  EXPECT_EQ(read_text(config).training.size(), 14);
  EXPECT_EQ(read_text(config).validation.size(), 0);
}

TEST(ReadText, ADatasetIsOneTextOfItsDocuments) {
  const TemporaryFolder folder;
  DataConfig config;
  config.path = {write_dataset(folder, "set", {{300, 301, 302}, {}, {303, 304}}),
                 folder.write("text", "abcde"),
                 write_dataset(folder, "wide", {{70000, 70001}}, TokenType::int32)};
  config.split = "60,40";
  const TextSplit split = read_text(config, 70002);
  EXPECT_EQ(ids_of(split.training), (std::vector<int64_t>{300, 301, 302, 'a', 'b', 'c', 70000}));
  EXPECT_EQ(ids_of(split.validation), (std::vector<int64_t>{303, 304, 'd', 'e', 70001}));
  std::vector<int64_t> middle(3);
  split.training.read(2, middle);
  EXPECT_EQ(middle, (std::vector<int64_t>{302, 'a', 'b'}));
  EXPECT_TRUE(throws_with<UsageError>([&] { split.training.read(5, middle); },
                                      "found 3 tokens at 5, allowed: inside the 7"));
  std::vector<int64_t> three(3);
  const TextSplit narrow = read_text(config, 303);
  narrow.training.read(0, three);
  EXPECT_TRUE(throws_with<FileError>(
      [&] { narrow.validation.read(1, three); },
      "set.bin': token 4: found id 304, allowed: 0 to 302 (model.vocab_size - 1)"));
}

TEST(ReadText, ADatasetStandsBeforeATextOfItsName) {
  const TemporaryFolder folder;
  DataConfig config;
  config.path = {folder.write("set", "text")};
  config.split = "1,0";
  EXPECT_EQ(read_text(config).training.size(), 4);
  folder.write("set.idx", "an index of something else");
  EXPECT_EQ(read_text(config).training.size(), 4);
  write_dataset(folder, "set", {{1, 2}});
  EXPECT_EQ(read_text(config).training.size(), 2);
  std::filesystem::remove(folder.path() / "set");
  std::filesystem::remove(folder.path() / "set.bin");
  EXPECT_TRUE(throws_with<FileError>([&] { read_text(config); }, "set.bin' cannot be read"));
}

TEST(ReadText, LongTextsAreTokenizedInPieces) {
  const TemporaryFolder folder;
  std::string text;
  while (text.size() < 2'500'000) text += std::to_string(text.size()) + "\n";
  DataConfig config;
  config.path = {folder.write("long", text)};
  config.split = "1,0";
  EXPECT_EQ(text_of(read_text(config).training), text);
}

TEST(ReadText, CompressedTextsAreDecompressed) {
  const TemporaryFolder folder;
  std::string text;
  while (text.size() < 2'500'000) text += std::to_string(text.size()) + "\n";
  const std::string gzip = testing::gzip_of(text), zstd = testing::zstd_of(text);
  DataConfig config;
  config.split = "1,0";
  for (const std::string& path : {folder.write("a.txt.gz", gzip), folder.write("a.zst", zstd)}) {
    config.path = {path};
    EXPECT_EQ(text_of(read_text(config).training), text);
  }
  config.path = {folder.write("none.gz", testing::gzip_of(""))};
  EXPECT_TRUE(throws_with<FileError>([&] { read_text(config); }, "none.gz' is empty"));
  const size_t half = gzip.size() / 2;
  const std::string torn = folder.write("torn.gz", gzip.substr(0, half));
  config.path = {torn};
  EXPECT_TRUE(throws_with<FileError>([&] { read_text(config); },
                                     "data.path: '" + torn +
                                         "': the compressed data end too early, at byte " +
                                         std::to_string(half)));
  const std::string plain = folder.write("plain.zst", "no zstd at all");
  config.path = {plain};
  EXPECT_TRUE(throws_with<FileError>([&] { read_text(config); },
                                     "'" + plain + "': the compressed data are damaged at byte"));
}

TEST(ReadText, NamesWhatIsWrong) {
  const TemporaryFolder folder;
  DataConfig config;
  EXPECT_TRUE(throws_with<ConfigError>([&] { read_text(config); }, "data.path: is not set"));
  config.path = {folder.path() / "missing"};
  EXPECT_TRUE(throws_with<FileError>([&] { read_text(config); }, "missing' cannot be read"));
  config.path = {folder.path()};
  EXPECT_TRUE(throws_with<FileError>([&] { read_text(config); }, "' cannot be read"));
  config.path = {folder.write("empty", "")};
  EXPECT_TRUE(throws_with<FileError>([&] { read_text(config); }, "is empty"));
  config.path = {write_dataset(folder, "none", {})};
  EXPECT_TRUE(throws_with<FileError>([&] { read_text(config); }, "none.bin' is empty"));
  config.tokenizer = "word";
  config.path = {folder.write("text", "text")};
  EXPECT_TRUE(throws_with<ConfigError>([&] { read_text(config); },
                                       "data.tokenizer: found 'word', allowed: byte, gpt2:FOLDER"));
}

TEST(SampleOrder, AnEpochTakesEveryWindowOnceFromARandomStart) {
  constexpr int64_t kTokens = 1007, kLength = 16;
  const SampleOrder order(kTokens, kLength, 5);
  const int64_t windows = order.samples_per_epoch();
  EXPECT_EQ(windows, 61);
  std::set<int64_t> shifts;
  for (int64_t epoch = 0; epoch < 20; ++epoch) {
    std::set<int64_t> starts;
    for (int64_t k = 0; k < windows; ++k) starts.insert(order.start_of(epoch * windows + k));
    ASSERT_EQ(static_cast<int64_t>(starts.size()), windows);
    EXPECT_GE(*starts.begin(), 0);
    EXPECT_LT(*starts.begin(), kLength);
    EXPECT_LT(*starts.rbegin() + kLength, kTokens);
    for (auto it = starts.begin(); std::next(it) != starts.end(); ++it)
      ASSERT_EQ(*std::next(it) - *it, kLength);
    shifts.insert(*starts.begin());
  }
  EXPECT_GT(shifts.size(), 5u);
}

TEST(SampleOrder, DependsOnSeedAndSampleAlone) {
  const SampleOrder a(1000, 8, 1), again(1000, 8, 1), other(1000, 8, 2);
  int equal = 0;
  for (int64_t k = 0; k < 300; ++k) {
    EXPECT_EQ(a.start_of(k), again.start_of(k));
    equal += a.start_of(k) == other.start_of(k);
  }
  EXPECT_LT(equal, 30);
  // The windows are shuffled.
  int ascending = 0;
  for (int64_t k = 1; k < 100; ++k) ascending += a.start_of(k) > a.start_of(k - 1);
  EXPECT_GT(ascending, 25);
  EXPECT_LT(ascending, 75);
}

TEST(SampleOrder, ShortTexts) {
  for (int64_t tokens = 9; tokens < 40; ++tokens) {
    const SampleOrder order(tokens, 8, 3);
    EXPECT_GE(order.samples_per_epoch(), 1);
    for (int64_t k = 0; k < 50; ++k) {
      EXPECT_GE(order.start_of(k), 0);
      EXPECT_LT(order.start_of(k) + 8, tokens) << tokens;
    }
  }
  EXPECT_TRUE(throws_with<ConfigError>([] { SampleOrder(8, 8, 3); }, "8 tokens, allowed: more"));
}

TEST(Microbatches, EveryLayoutTakesTheSameSamples) {
  struct Layout {
    int64_t micro, ranks;
  };
  for (const auto [micro, ranks] : {Layout{12, 1}, {1, 1}, {2, 3}, {1, 4}, {3, 2}, {6, 2}}) {
    std::set<int64_t> seen;
    for (int64_t m = 0; m < 12 / (micro * ranks); ++m)
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const SampleRange range = microbatch_samples(24, micro, m, rank, ranks);
        for (int64_t k = range.first; k < range.last; ++k) EXPECT_TRUE(seen.insert(k).second);
      }
    EXPECT_EQ(seen.size(), 12u);
    EXPECT_EQ(*seen.begin(), 24);
    EXPECT_EQ(*seen.rbegin(), 35);
  }
}

TEST(EvaluationWindows, ALastPartialWindowIsDropped) {
  EXPECT_EQ(evaluation_windows(0, 4), 0);
  EXPECT_EQ(evaluation_windows(4, 4), 0);
  EXPECT_EQ(evaluation_windows(5, 4), 1);
  EXPECT_EQ(evaluation_windows(8, 4), 1);
  EXPECT_EQ(evaluation_windows(9, 4), 2);
}

TEST(ByteTokenizer, EveryByteSurvives) {
  std::string all;
  for (int i = 0; i < 256; ++i) all.push_back(static_cast<char>(i));
  ByteTokenizer tokenizer;
  auto ids = tokenizer.encode(all);
  EXPECT_EQ(ids[255], 255);
  EXPECT_EQ(tokenizer.decode(ids), all);
  ids.push_back(tokenizer.end_of_document());
  EXPECT_EQ(tokenizer.decode(ids), all);
  EXPECT_EQ(tokenizer.vocabulary_size(), 257);
  EXPECT_TRUE(throws_with<UsageError>([&] { tokenizer.decode({257}); }, "found 257"));
}

TEST(Crc32, AsZlibHasIt) {
  EXPECT_EQ(crc32(""), 0u);
  EXPECT_EQ(crc32("123456789"), 0xCBF43926u);
  const std::string text = "The quick brown fox jumps over the lazy dog";
  EXPECT_EQ(crc32(text), 0x414FA339u);
  for (size_t cut = 0; cut < text.size(); ++cut)
    EXPECT_EQ(crc32(text.substr(cut), crc32(text.substr(0, cut))), 0x414FA339u);
  std::string bytes;
  for (int i = 0; i < 1000; ++i) bytes.push_back(static_cast<char>((i * i * 7 + i / 3) % 251));
  EXPECT_EQ(crc32(bytes), 0x0FC7934Bu);
  // Long inputs take another code path than single bytes.
  for (size_t length = 0; length < 300; ++length) {
    uint32_t expected = 5;
    for (size_t i = 0; i < length; ++i) expected = crc32(bytes.substr(i, 1), expected);
    EXPECT_EQ(crc32(bytes.substr(0, length), 5), expected) << length;
  }
}

}  // namespace
}  // namespace lockstep
