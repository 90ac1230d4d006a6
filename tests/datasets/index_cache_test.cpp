#include "lockstep/datasets/index_cache.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <random>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/datasets/unfinished_file.h"
#include "lockstep/tests/support/file_size_limit.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::FileSizeLimit;
using testing::TemporaryFolder;
using testing::throws_with;

SampleIndex small_index(uint32_t seed = 1) {
  static const std::vector<int32_t> lengths = {5, 3, 7, 4};
  return build_sample_index({reinterpret_cast<const char*>(lengths.data()), 4}, {0, 4},
                            {.seq_length = 4, .seed = seed});
}

std::string file_of(const SampleIndex& index, const std::string& description) {
  std::string bytes;
  write_index_cache(index, description, [&](std::string_view part) { bytes += part; });
  return bytes;
}

void expect_equal(const SampleIndexView& view, const SampleIndex& index) {
  ASSERT_EQ(view.documents.size(), static_cast<int64_t>(index.documents.size()));
  ASSERT_EQ(view.starts.size(), static_cast<int64_t>(index.starts.size()));
  ASSERT_EQ(view.num_samples(), index.num_samples());
  for (size_t i = 0; i < index.documents.size(); ++i)
    EXPECT_EQ(view.documents[static_cast<int64_t>(i)], index.documents[i]);
  for (size_t i = 0; i < index.starts.size(); ++i)
    EXPECT_EQ(view.starts[static_cast<int64_t>(i)], index.starts[i]);
  for (size_t i = 0; i < index.order.size(); ++i)
    EXPECT_EQ(view.order[static_cast<int64_t>(i)], index.order[i]);
}

TEST(IndexCache, AFileReadsBackEqual) {
  const std::string bytes = file_of(small_index(), "what it is of");
  const SampleIndexView view = parse_index_cache(bytes, "file");
  EXPECT_EQ(view.description, "what it is of");
  expect_equal(view, small_index());
  expect_equal(view_of(small_index()), small_index());
  EXPECT_EQ(bytes.size(), 8 + 8 + 13 + 16 + 4 * 4 + 5 * 16 + 4 * 8 + 4);
}

TEST(IndexCache, EveryCutAndEveryFlippedBitIsFound) {
  const std::string bytes = file_of(small_index(), "d");
  for (size_t cut = 0; cut < bytes.size(); ++cut)
    EXPECT_THROW(parse_index_cache(std::string_view(bytes).substr(0, cut), "f"), FileError) << cut;
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    std::string damaged = bytes;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    EXPECT_THROW(parse_index_cache(damaged, "f"), FileError) << bit;
  }
  EXPECT_TRUE(throws_with<FileError>([&] { parse_index_cache(bytes + "x", "f"); },
                                     "'f': byte 165: found 1 bytes after the checksum"));
  EXPECT_TRUE(throws_with<FileError>([&] { parse_index_cache(bytes.substr(0, 60), "f"); },
                                     "'f': byte 49: starts of the samples: found the end"));
  std::string other = bytes;
  other.back() = static_cast<char>(other.back() ^ 1);
  EXPECT_TRUE(throws_with<FileError>([&] { parse_index_cache(other, "f"); }, "checksum: found"));
}

class CachedIndex : public ::testing::Test {
 protected:
  SampleIndexView open(const std::string& description, uint32_t seed = 1, bool required = true) {
    return cached_sample_index({path_, description, required}, [&] {
      ++built_;
      return small_index(seed);
    });
  }

  TemporaryFolder folder_;
  std::string path_ = folder_.path() / "new" / "folder" / "index";
  std::atomic<int> built_ = 0;
};

TEST_F(CachedIndex, IsBuiltOnce) {
  expect_equal(open("a"), small_index());
  expect_equal(open("a", 2), small_index());
  EXPECT_EQ(built_, 1);
}

TEST_F(CachedIndex, StaleAndDamagedFilesAreReplaced) {
  const SampleIndexView first = open("a");
  expect_equal(open("b", 2), small_index(2));
  EXPECT_EQ(built_, 2);
  expect_equal(first, small_index());  // still mapped
  std::filesystem::resize_file(path_, 100);
  expect_equal(open("b", 2), small_index(2));
  EXPECT_EQ(built_, 3);
  open("b");
  EXPECT_EQ(built_, 3);
}

TEST_F(CachedIndex, OneOfManyThreadsBuilds) {
  std::vector<std::thread> threads;
  for (int i = 0; i < 16; ++i)
    threads.emplace_back([&] { expect_equal(open("a"), small_index()); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(built_, 1);
}

TEST_F(CachedIndex, OneOfManyProcessesBuilds) {
  constexpr int kWrong = 98, kFailed = 99;  // exit statuses; the others say how many were built
  std::vector<pid_t> children;
  for (int i = 0; i < 12; ++i) {
    children.push_back(::fork());
    if (children.back() != 0) continue;
    try {
      const SampleIndexView view = open("a");
      const SampleIndex index = small_index();
      ::_exit(view.order[0] == index.order[0] && view.num_samples() == 4 ? built_.load() : kWrong);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "process %d: %s\n", i, error.what());
    } catch (...) {  // nothing may get into the test's runner
    }
    ::_exit(kFailed);
  }
  int built = 0;
  for (const pid_t child : children) {
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_NE(WEXITSTATUS(status), kFailed) << "a process has thrown";
    EXPECT_NE(WEXITSTATUS(status), kWrong) << "a process has another index";
    built += WEXITSTATUS(status);
  }
  EXPECT_EQ(built, 1);
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder_.path() / "new/folder"))
    files += entry.is_regular_file() ? 1 : 0;
  EXPECT_EQ(files, 2u);  // the index and the lock
}

// As on a file system whose locks do not reach other hosts.
TEST_F(CachedIndex, WhatAnotherProcessStoresReplacesWhatCannotBeWritten) {
  for (const int delay : {0, 200}) {  // milliseconds
    path_ = folder_.path() / ("index" + std::to_string(delay));
    std::unique_ptr<UnfinishedFile> theirs;
    std::unique_ptr<FileSizeLimit> full;
    std::thread other;
    const SampleIndexView view = cached_sample_index({path_, "a", /*required=*/true}, [&] {
      theirs = std::make_unique<UnfinishedFile>(path_);
      theirs->write(file_of(small_index(2), "a"));
      theirs->sync();
      full = std::make_unique<FileSizeLimit>(0);
      other = std::thread([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(delay));
        theirs->publish();
      });
      if (delay == 0) other.join();
      return small_index(1);
    });
    full.reset();
    if (delay > 0) other.join();
    expect_equal(view, small_index(2));
  }
}

TEST_F(CachedIndex, AFileThatCannotBeWritten) {
  path_ = folder_.write("file", "") + "/index";
  expect_equal(open("a", 1, /*required=*/false), small_index());
  EXPECT_TRUE(throws_with<FileError>([&] { open("a"); }, path_ + "' cannot be created"));
}

}  // namespace
}  // namespace lockstep
