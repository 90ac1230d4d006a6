#include "lockstep/training/data/text_dataset.h"

#include <gtest/gtest.h>

#include <set>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/training/data/tokenizer.h"

namespace lockstep {
namespace {

using testing::TemporaryFolder;
using testing::throws_with;

TEST(ReadText, EachFileIsSplit) {
  const TemporaryFolder folder;
  DataConfig config;
  config.path = {folder.write("a", "0123456789"), folder.write("b", std::string("ab\0\xff", 4))};
  config.split = "50,30,20";
  const TextSplit split = read_text(config);
  EXPECT_EQ(split.training, "01234ab");
  EXPECT_EQ(split.validation, std::string("567\0", 4));
  config.split = "1,0";
  EXPECT_EQ(read_text(config).training.size(), 14u);
  EXPECT_EQ(read_text(config).validation, "");
}

TEST(ReadText, NamesWhatIsWrong) {
  const TemporaryFolder folder;
  DataConfig config;
  EXPECT_TRUE(throws_with<ConfigError>([&] { read_text(config); }, "data.path: is not set"));
  config.path = {folder.path() / "missing"};
  EXPECT_TRUE(throws_with<FileError>([&] { read_text(config); }, "missing' cannot be read"));
  config.path = {folder.path()};
  EXPECT_TRUE(throws_with<FileError>([&] { read_text(config); }, folder.path()));
  config.path = {folder.write("empty", "")};
  EXPECT_TRUE(throws_with<FileError>([&] { read_text(config); }, "is empty"));
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
  // In order of appearance the windows are shuffled.
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
  const auto ids = ByteTokenizer::encode(all);
  EXPECT_EQ(ids[255], 255);
  EXPECT_EQ(ByteTokenizer::decode(ids), all);
  EXPECT_TRUE(throws_with<UsageError>([] { ByteTokenizer::decode({256}); }, "found 256"));
}

}  // namespace
}  // namespace lockstep
