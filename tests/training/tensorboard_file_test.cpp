// The contents of an event file, byte by byte. tests/end_to_end/tensorboard_test.py has TensorBoard
// read one.

#include "lockstep/training/tensorboard_file.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/training/crc32c.h"

#include "training/telemetry/tensorboard_event.pb.h"

namespace lockstep {
namespace {

using tensorboard::Event;

/// The events of a file; each record's length and checksums are checked.
std::vector<Event> events_in(const std::string& bytes) {
  std::vector<Event> events;
  const auto masked = [](std::string_view text) {
    const uint32_t crc = crc32c(text);
    return ((crc >> 15) | (crc << 17)) + 0xA282EAD8U;
  };
  for (size_t at = 0; at < bytes.size();) {
    uint64_t length = 0;
    uint32_t of_length = 0, of_data = 0;
    std::memcpy(&length, &bytes.at(at), 8);
    std::memcpy(&of_length, &bytes.at(at + 8), 4);
    const std::string data = bytes.substr(at + 12, length);
    std::memcpy(&of_data, &bytes.at(at + 12 + length), 4);
    EXPECT_EQ(of_length, masked({&bytes.at(at), 8}));
    EXPECT_EQ(of_data, masked(data));
    EXPECT_TRUE(events.emplace_back().ParseFromString(data));
    at += 16 + length;
  }
  return events;
}

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

TEST(Crc32c, IsCastagnolis) {
  // RFC 3720, B.4.
  EXPECT_EQ(crc32c("123456789"), 0xE3069283);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AA);
  EXPECT_EQ(crc32c(std::string(32, '\xFF')), 0x62A8AB43);
  EXPECT_EQ(crc32c(""), 0u);
}

TEST(TensorBoardFile, HoldsAVersionAStartAndOneRecordAStep) {
  const testing::TemporaryFolder folder;
  TensorBoardFile file(folder.path() / "deep" / "a folder", 8);
  const std::string name = "deep/a folder/" + names_in(folder.path() / "deep/a folder").at(0);
  EXPECT_EQ(file.write(8, {{"train/lm_loss", 2.5}, {"train/skipped", 0}}), "");
  EXPECT_EQ(events_in(folder.read(name)).size(), 3u);  // while it is still open
  EXPECT_EQ(file.write(9, {}), "");
  EXPECT_EQ(file.path(), folder.path() / name);
  const std::vector<Event> events = events_in(folder.read(name));
  ASSERT_EQ(events.size(), 4u);
  EXPECT_EQ(events[0].file_version(), "brain.Event:2");
  EXPECT_GT(events[0].wall_time(), 1.7e9);
  EXPECT_EQ(events[1].session_log().status(), tensorboard::SessionLog::START);
  EXPECT_EQ(events[1].step(), 8);
  EXPECT_EQ(events[2].step(), 8);
  ASSERT_EQ(events[2].summary().value_size(), 2);
  EXPECT_EQ(events[2].summary().value(0).tag(), "train/lm_loss");
  EXPECT_EQ(events[2].summary().value(0).simple_value(), 2.5F);
  EXPECT_TRUE(events[2].summary().value(1).has_simple_value());  // even if it is 0
  EXPECT_EQ(events[3].step(), 9);
}

TEST(TensorBoardFile, EachFileOfAFolderComesAfterThoseBeforeIt) {
  const testing::TemporaryFolder folder;
  folder.write("events.out.tfevents.9000000000.elsewhere.1", "");  // a clock that is ahead
  folder.write("events.out.tfevents.not_a_time", "");
  folder.write("notes", "");
  std::vector<std::string> made;
  for (int run = 0; run < 3; ++run)  // within a second
    made.push_back(std::filesystem::path(TensorBoardFile(folder.path(), 1).path()).filename());
  EXPECT_TRUE(std::is_sorted(made.begin(), made.end()));
  EXPECT_EQ(std::adjacent_find(made.begin(), made.end()), made.end());
  EXPECT_GT(made[0], "events.out.tfevents.9000000000.elsewhere.1");
  EXPECT_EQ(names_in(folder.path()).size(), 6u);
}

TEST(TensorBoardFile, AFolderThatCannotBeMadeOrWrittenIsNamed) {
  EXPECT_TRUE(testing::throws_with<FileError>([] { TensorBoardFile("/proc/none/of this", 1); },
                                              "train.tensorboard: folder '/proc/none/of this'"));
  EXPECT_TRUE(testing::throws_with<FileError>([] { TensorBoardFile("/proc/self", 1); },
                                              "/proc/self/events.out.tfevents."));
}

/// Limits the length of files to `bytes` during its lifetime.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit = {bytes, before_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    action_ = std::signal(SIGXFSZ, SIG_IGN);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, action_);
  }

 private:
  rlimit before_ = {};
  void (*action_)(int) = nullptr;
};

TEST(TensorBoardFile, ADiskThatIsFullIsToldOnceAndLeavesWholeRecords) {
  const testing::TemporaryFolder folder;
  TensorBoardFile file(folder.path(), 1);
  const std::vector<Scalar> scalars = {{"a tag of some length, so that records are long", 1}};
  EXPECT_EQ(file.write(1, scalars), "");
  const auto whole = std::filesystem::file_size(file.path());
  {
    const FileSizeLimit limit(whole + 20);  // within the next record
    const std::string told = file.write(2, scalars);
    EXPECT_NE(told.find(file.path() + "' cannot be written: File too large"), told.npos) << told;
    EXPECT_NE(told.find("it ends before iteration 2"), told.npos) << told;
    EXPECT_EQ(file.write(3, scalars), "");
  }
  EXPECT_EQ(file.write(4, scalars), "");  // a gap would look like a run without these steps
  EXPECT_EQ(std::filesystem::file_size(file.path()), whole);
  EXPECT_EQ(events_in(folder.read(std::filesystem::path(file.path()).filename())).back().step(), 1);
}

TEST(TensorBoardFile, GoingBackBeginsAnotherFile) {
  const testing::TemporaryFolder folder;
  TensorBoardFile file(folder.path(), 1);
  const std::filesystem::path first = file.path();
  EXPECT_EQ(file.write(1, {}), "");
  EXPECT_EQ(file.write(2, {}), "");
  EXPECT_EQ(file.go_back(2), "");
  EXPECT_EQ(file.write(2, {}), "");
  EXPECT_GT(file.path(), first.string());
  EXPECT_EQ(events_in(folder.read(first.filename())).size(), 4u);
  const std::vector<Event> events =
      events_in(folder.read(std::filesystem::path(file.path()).filename()));
  ASSERT_EQ(events.size(), 3u);
  EXPECT_EQ(events[1].session_log().status(), tensorboard::SessionLog::START);
  EXPECT_EQ(events[1].step(), 2);
  EXPECT_EQ(events[2].step(), 2);
}

TEST(TensorBoardFile, AFileThatCannotBeBegunAnewIsToldOnce) {
  const testing::TemporaryFolder folder;
  const std::filesystem::path events = folder.path() / "events";
  TensorBoardFile file(events, 1);
  std::filesystem::remove_all(events);
  folder.write("events", "a file where the folder was");
  const std::string told = file.go_back(1);
  EXPECT_TRUE(told.starts_with("train.tensorboard: ")) << told;
  EXPECT_NE(told.find(events.string()), told.npos) << told;
  EXPECT_EQ(file.write(1, {}), "");
  std::filesystem::remove(events);  // there is room again
  EXPECT_EQ(file.go_back(1), "");
  EXPECT_EQ(file.write(1, {}), "");
  EXPECT_FALSE(std::filesystem::exists(events));
}

}  // namespace
}  // namespace lockstep
