#include "lockstep/datasets/microbatch_loader.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>

#include "lockstep/core/check.h"
#include "lockstep/datasets/file_bytes.h"
#include "lockstep/datasets/mapped_files.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using testing::throws_with;

/// Sample k is k, k, ...; reading sample `bad` fails.
class CountingSource : public SampleSource {
 public:
  struct Counts {
    std::atomic<int64_t> reads = 0;
    std::atomic<double> seconds = 0;  ///< of these reads
    std::atomic<bool> gone = false;
  };

  explicit CountingSource(Counts& counts, int64_t bad = -1, milliseconds delay = {})
      : counts_(counts), bad_(bad), delay_(delay) {}
  ~CountingSource() override { counts_.gone = true; }

  void read(int64_t sample, std::span<int64_t> out) override {
    const auto begin = std::chrono::steady_clock::now();
    std::this_thread::sleep_for(delay_);
    require<FileError>(sample != bad_, "'set.bin': token {}: found id 9, allowed: 0 to 8", sample);
    std::fill(out.begin(), out.end(), sample);
    ++counts_.reads;
    counts_.seconds +=
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  }

 private:
  Counts& counts_;
  int64_t bad_;
  milliseconds delay_;
};

constexpr int64_t kRanks = 3;

BatchSchedule schedule(const std::string& rampup = "6 6 40") {
  TrainConfig config;
  config.micro_batch_size = 2;
  config.global_batch_size = 18;
  config.rampup_batch_size = rampup;
  return {config, kRanks};
}

class MicrobatchLoaderTest : public ::testing::TestWithParam<int64_t> {
 protected:
  MicrobatchLoader::Options options(int64_t rank = 0) const {
    return {.seq_length = 3, .rank = rank, .ranks = kRanks, .prefetch = GetParam()};
  }
  std::unique_ptr<SampleSource> source(int64_t bad = -1, milliseconds delay = {}) {
    return std::make_unique<CountingSource>(counts_, bad, delay);
  }

  CountingSource::Counts counts_;
};

TEST_P(MicrobatchLoaderTest, RanksTogetherReadEverySampleOnceWhileTheBatchGrows) {
  std::vector<int64_t> seen(200);
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    MicrobatchLoader loader(source(), schedule(), options(rank));
    int64_t consumed = 0, number = 0;
    while (true) {
      const BatchSizes sizes = schedule().at(consumed);
      const Microbatch batch = loader.next();
      ASSERT_EQ(batch.consumed_samples, consumed);
      ASSERT_EQ(batch.number, number);
      const SampleRange range = microbatch_samples(consumed, 2, number, rank, kRanks);
      ASSERT_EQ(batch.samples.first, range.first);
      ASSERT_EQ(batch.samples.last, range.last);
      ASSERT_EQ(batch.ids.size(), 8u);
      for (size_t i = 0; i < 8; ++i)
        ASSERT_EQ(batch.ids[i], range.first + static_cast<int64_t>(i) / 4);
      if (range.last > 200) break;
      for (int64_t k = range.first; k < range.last; ++k) ++seen[static_cast<size_t>(k)];
      if (++number < sizes.num_microbatches) continue;
      number = 0;
      consumed += sizes.global;
    }
  }
  for (size_t k = 0; k < 150; ++k) EXPECT_EQ(seen[k], 1) << k;
}

TEST_P(MicrobatchLoaderTest, GoesOnWhereItIsTold) {
  MicrobatchLoader from_start(source(), schedule(), options()),
      resumed(source(), schedule(), options());
  std::vector<Microbatch> all;
  for (int i = 0; i < 30; ++i) all.push_back(from_start.next());
  for (const size_t at : {12, 0, 3, 20}) {
    // An iteration begins with micro-batch 0.
    size_t begin = at;
    while (all[begin].number != 0) --begin;
    resumed.seek(all[begin].consumed_samples);
    for (size_t i = begin; i < begin + 8; ++i) {
      const Microbatch batch = resumed.next();
      EXPECT_EQ(batch.consumed_samples, all[i].consumed_samples);
      EXPECT_EQ(batch.number, all[i].number);
      EXPECT_EQ(batch.ids, all[i].ids);
    }
  }
}

TEST_P(MicrobatchLoaderTest, ReadsNoFurtherThanAsked) {
  MicrobatchLoader loader(source(), schedule(), options());
  for (int i = 1; i <= 3; ++i) {
    loader.next();
    const int64_t most = 2 * (i + GetParam());
    for (int wait = 0; wait < 200 && counts_.reads < most; ++wait)
      std::this_thread::sleep_for(milliseconds(5));
    std::this_thread::sleep_for(milliseconds(10));
    EXPECT_EQ(counts_.reads, most);
  }
}

TEST_P(MicrobatchLoaderTest, SeekingToWhereItIsReadsNothingAgain) {
  MicrobatchLoader loader(source(), schedule("18 1 1"), options());
  loader.seek(0);
  for (int64_t iteration = 0; iteration < 5; ++iteration) {
    loader.seek(18 * iteration);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(loader.next().consumed_samples, 18 * iteration);
  }
  EXPECT_LE(counts_.reads, 2 * (15 + GetParam()));
}

TEST_P(MicrobatchLoaderTest, ErrorsComeInTheirPlace) {
  MicrobatchLoader loader(source(/*bad=*/13), schedule(), options());
  // Rank 0 reads 0 1 | 6 7 | 12 13.
  EXPECT_EQ(loader.next().ids[0], 0);
  EXPECT_EQ(loader.next().ids[0], 6);
  const auto next = [&] { loader.next(); };
  EXPECT_TRUE(throws_with<FileError>(next, "'set.bin': token 13: found id 9"));
  EXPECT_TRUE(throws_with<FileError>(next, "'set.bin': token 13: found id 9"));
  loader.seek(48);
  EXPECT_EQ(loader.next().ids[0], 48);
}

/// Also after a read that failed, and while the thread comes to one.
TEST_P(MicrobatchLoaderTest, EndsAtAnyTime) {
  for (int reads = 0; reads < 4; ++reads)
    for (const int64_t bad : {-1, 0, 7}) {
      counts_.gone = false;
      int failed = 0;
      {
        MicrobatchLoader loader(source(bad, milliseconds(1)), schedule(), options());
        for (int i = 0; i < reads; ++i) {
          try {
            loader.next();
          } catch (const FileError&) {
            ++failed;
          }
        }
        if (reads == 3) loader.seek(6);
      }
      EXPECT_TRUE(counts_.gone);
      const int good = bad < 0 ? reads : bad == 0 ? 0 : 1;  // rank 0 reads 0 1 | 6 7 | 12 13
      EXPECT_EQ(failed, std::max(reads - good, 0));
    }
}

TEST_P(MicrobatchLoaderTest, ReadingIsHiddenBehindWork) {
  // 10 ms of reading, 40 ms of work.
  MicrobatchLoader loader(source(-1, milliseconds(5)), schedule("18 1 1"), options());
  for (int i = 0; i < 10; ++i) {
    loader.next();
    std::this_thread::sleep_for(milliseconds(40));
  }
  const double read = counts_.seconds;
  if (GetParam() == 0)
    EXPECT_GE(loader.seconds_waited(), read);
  else
    EXPECT_LT(loader.seconds_waited(), 0.75 * read);
}

INSTANTIATE_TEST_SUITE_P(Prefetch, MicrobatchLoaderTest, ::testing::Values(0, 1, 2, 7),
                         ::testing::PrintToStringParamName());

/// Each sample is byte 8197 of a file, which is mapped if it is large.
class FileSource : public SampleSource {
 public:
  explicit FileSource(const std::string& path) : file_(path) {}

  void read(int64_t /*sample*/, std::span<int64_t> out) override {
    const volatile char* const bytes = file_.bytes().data();
    std::fill(out.begin(), out.end(), static_cast<int64_t>(bytes[8197]));
  }

 private:
  FileBytes file_;
};

TEST(MicrobatchLoaderDeathTest, TheThreadThatReadsAheadTellsOfAMappedFileThatBecomesShorter) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.write("shrinks", "");
  std::filesystem::resize_file(path, uintmax_t{65} << 20);
  const auto read_what_has_gone = [&] {
    tell_faults_of_mapped_files();
    MicrobatchLoader loader(std::make_unique<FileSource>(path), schedule(),
                            {.seq_length = 3, .rank = 0, .ranks = kRanks, .prefetch = 1});
    std::filesystem::resize_file(path, 4096);
    loader.next();
    std::_Exit(3);
  };
  EXPECT_EXIT(read_what_has_gone(), ::testing::ExitedWithCode(1),
              "lockstep: '.*shrinks' can no longer be read at byte 8197: it was truncated");
}

}  // namespace
}  // namespace lockstep
