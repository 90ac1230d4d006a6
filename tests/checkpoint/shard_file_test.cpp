#include "lockstep/checkpoint/shard_file.h"

#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <numeric>
#include <string>
#include <vector>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/rank_reports.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/file_size_limit.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::FileSizeLimit;
using testing::TemporaryFolder;
using testing::throws_with;

TEST(ShardFile, AWriteThatIsGivenUpEndsBeforeTheNextBlockAndLeavesNoFile) {
  const TemporaryFolder folder;
  const std::string bytes(16 << 20, 'b');
  const int64_t size = std::ssize(bytes);
  const std::vector<ShardContent> contents = {
      {"w", "", "U8", {whole_box({size}), {0, size}}, bytes.data(), size}};
  std::atomic<bool> stop = true;
  const auto given_up = [](const auto& body) {
    return throws_with<FileError>(body, "the save was given up");
  };
  EXPECT_TRUE(given_up([&] { write_shard(folder.path(), "s", contents, &stop); }));
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "s"));
  stop = false;
  ShardWriter writer(folder.path(), "part", &stop);
  writer.write(bytes);
  stop = true;
  EXPECT_TRUE(given_up([&] { writer.write(bytes); }));
  EXPECT_TRUE(given_up([&] { writer.finish(); }));
  EXPECT_EQ(std::filesystem::file_size(folder.path() / "part"), bytes.size());
  stop = false;
  EXPECT_EQ(write_shard(folder.path(), "s", contents, &stop).file.block_crc32.size(), 17u);
}

TEST(ShardFile, ReadsOnlyTheBlocksThatHoldWhatIsAsked) {
  const TemporaryFolder folder;
  std::vector<int32_t> numbers(1 << 20);  // four blocks plus the header
  std::iota(numbers.begin(), numbers.end(), 0);
  const TensorPart part{whole_box({1 << 20}), {0, 1 << 20}};
  const WrittenShard shard =
      write_shard(folder.path(), "s", {{"w", "", "I32", part, numbers.data(), int64_t{4} << 20}});
  EXPECT_EQ(shard.file.block_crc32.size(), 5u);
  ShardReader reader(folder.path(), shard.file);
  std::vector<int32_t> out(1000);
  reader.read(shard.offsets[0] + 4 * 300000, 4000, reinterpret_cast<char*>(out.data()), "w");
  EXPECT_EQ(out.front(), 300000);
  EXPECT_EQ(out.back(), 300999);
  EXPECT_EQ(reader.bytes_read(), kChecksumBlock);
  out.resize(700000);
  reader.read(shard.offsets[0] + 4 * 300001, 2800000, reinterpret_cast<char*>(out.data()), "w");
  EXPECT_EQ(out.back(), 1000000);
  EXPECT_EQ(reader.find_damage(), -1);
}

TEST(ShardFile, AWriteThatFailsLeavesNoFile) {
  const TemporaryFolder folder;
  const std::string bytes(4 << 20, 'b');
  const int64_t size = std::ssize(bytes);
  const std::vector<ShardContent> contents = {
      {"w", "", "U8", {whole_box({size}), {0, size}}, bytes.data(), size}};
  const FileSizeLimit limit(3 << 19);  // cuts the second block
  EXPECT_TRUE(throws_with<FileError>([&] { write_shard(folder.path(), "s", contents); },
                                     "/s' cannot be written: File too large"));
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "s"));
}

TEST(RankReports, OfASaveThatIsGivenUpDoNotAppear) {
  const TemporaryFolder folder;
  const PartialCheckpoint checkpoint(folder.path(), 1);
  checkpoint.begin();
  Manifest part;
  part.iteration = 7;
  std::atomic<bool> stop = true;
  const auto given_up = [](const auto& body) {
    return throws_with<FileError>(body, "the save was given up");
  };
  EXPECT_TRUE(given_up([&] { write_report(checkpoint, 1, part, &stop); }));
  EXPECT_TRUE(std::filesystem::is_empty(checkpoint.file("")));
  EXPECT_TRUE(given_up([&] { wait_for_report(checkpoint, 1, &stop); }));
  stop = false;
  write_report(checkpoint, 1, part, &stop);
  EXPECT_EQ(wait_for_report(checkpoint, 1, &stop).iteration, 7);
  remove_report(checkpoint, 1);
  EXPECT_TRUE(std::filesystem::is_empty(checkpoint.file("")));
}

}  // namespace
}  // namespace lockstep
