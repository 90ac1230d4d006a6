#include "lockstep/core/input_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

// read_faults_test.py covers failing calls.

namespace lockstep {
namespace {

using testing::TemporaryFolder;
using testing::throws_with;

TEST(InputFile, ReadsFromTheFrontAndAnywhere) {
  const TemporaryFolder folder;
  InputFile file(folder.write("a", "0123456789"));
  EXPECT_EQ(file.size(), 10);
  std::string text(6, ' ');
  EXPECT_EQ(file.read(text.data(), 6), 6u);
  EXPECT_EQ(text, "012345");
  file.read_at(7, text.data(), 3);
  EXPECT_EQ(text, "789345");
  EXPECT_EQ(file.read(text.data(), 6), 4u);
  EXPECT_EQ(text, "678945");
  EXPECT_EQ(file.read(text.data(), 6), 0u);
  EXPECT_TRUE(throws_with<FileError>([&] { file.read_at(8, text.data(), 3); },
                                     "a' cannot be read at byte 10: it was truncated"));
}

TEST(InputFile, ACutFileIsNoShorterFile) {
  const TemporaryFolder folder;
  InputFile file(folder.write("a", "0123456789"));
  std::filesystem::resize_file(folder.path() / "a", 4);
  EXPECT_TRUE(throws_with<FileError>([&] { read_all(file); },
                                     "a' cannot be read at byte 4: it ends there, allowed: 10"));
}

TEST(InputFile, AGrownFileIsReadToItsEnd) {
  const TemporaryFolder folder;
  InputFile file(folder.write("a", "0123"));
  folder.write("a", std::string(3 << 20, 'x'));
  EXPECT_EQ(read_all(file).size(), size_t{3} << 20);
}

TEST(InputFile, TakesTheKindsThatAreAllowed) {
  const TemporaryFolder folder;
  const std::string fifo = folder.path() / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_TRUE(throws_with<FileError>([&] { InputFile{fifo}; }, "found no regular file"));
  const auto open = [](const std::string& path) {
    InputFile(path, {.kinds = InputKinds::regular_or_pipe});
  };
  EXPECT_TRUE(throws_with<FileError>([&] { open("/dev/zero"); }, "neither a regular file nor"));
  EXPECT_TRUE(throws_with<FileError>([&] { open(folder.path()); }, "Is a directory"));
  const std::string long_text(200'000, 'x');
  std::thread writer([&] { std::ofstream(fifo) << long_text; });
  InputFile pipe(fifo, {.kinds = InputKinds::regular_or_pipe});
  EXPECT_EQ(read_all(pipe), long_text);
  writer.join();
  InputFile zeros("/dev/zero", {.kinds = InputKinds::any});
  std::string some(10, 'x');
  EXPECT_EQ(zeros.read(some.data(), 10), 10u);
  EXPECT_EQ(some, std::string(10, '\0'));
  EXPECT_TRUE(throws_with<FileError>([&] { InputFile(folder.path() / "none"); }, "No such file"));
}

TEST(InputFile, LimitsAreNamed) {
  const TemporaryFolder folder;
  const std::string path = folder.write("a", "0123456789");
  EXPECT_EQ(read_file(path, 10), "0123456789");
  EXPECT_TRUE(throws_with<FileError>([&] { read_file(path, 9); },
                                     "found 10 bytes or more, allowed: up to 9"));
  std::filesystem::resize_file(path, uintmax_t{1} << 43);
  EXPECT_TRUE(throws_with<FileError>([&] { read_file(path, int64_t{1} << 61); },
                                     "do not fit into the memory"));
  std::filesystem::create_symlink(path, folder.path() / "link");
  EXPECT_TRUE(throws_with<FileError>([&] { read_file(folder.path() / "link", 9); }, "symbolic"));
}

TEST(KindOfFile, NoneIsWhatIsNotThere) {
  const TemporaryFolder folder;
  const std::string path = folder.write("a", "");
  EXPECT_EQ(kind_of_file(path), FileKind::regular);
  EXPECT_EQ(kind_of_file(folder.path()), FileKind::folder);
  EXPECT_EQ(kind_of_file("/dev/null"), FileKind::other);
  EXPECT_EQ(kind_of_file(folder.path() / "none"), FileKind::none);
  EXPECT_EQ(kind_of_file(path + "/below"), FileKind::none);
  const std::string loop = folder.path() / "loop";
  std::filesystem::create_symlink("loop", loop);
  EXPECT_EQ(kind_of_file(loop, /*follow_links=*/false), FileKind::other);
  EXPECT_TRUE(throws_with<FileError>([&] { kind_of_file(loop); },
                                     "'" + loop + "' cannot be read: Too many levels"));
}

TEST(NamesInFolder, AllButTheFoldersThemselves) {
  const TemporaryFolder folder;
  folder.write("a", "");
  folder.write(".b", "");
  auto names = names_in_folder(folder.path());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names, (std::vector<std::string>{".b", "a"}));
  EXPECT_TRUE(throws_with<FileError>([&] { names_in_folder(folder.path() / "a"); }, "Not a dir"));
}

}  // namespace
}  // namespace lockstep
