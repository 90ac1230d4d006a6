#include "lockstep/checkpoint/folder_lock.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::TemporaryFolder;
using testing::throws_with;

TEST(FolderLock, FoldersThatALockHasMadeGoWithItIfTheyAreEmpty) {
  const TemporaryFolder around;
  for (const std::string end : {"", "/"}) {
    const std::string outer = around.path() / "outer", inner = outer + "/middle/inner";
    { const FolderLock lock(inner + end); }
    EXPECT_FALSE(std::filesystem::exists(outer));
    {
      const FolderLock lock(inner + end);
      std::ofstream(outer + "/middle/kept") << "something";
    }
    EXPECT_FALSE(std::filesystem::exists(inner));
    EXPECT_TRUE(std::filesystem::exists(outer + "/middle/kept"));
    std::filesystem::remove(outer + "/middle/kept");
    // Folders that existed before stay, even if empty.
    { const FolderLock lock(outer + "/middle" + end); }
    EXPECT_TRUE(std::filesystem::is_empty(outer + "/middle"));
    std::filesystem::remove_all(outer);
  }
}

/// Somebody has removed the file of the first run, and so let another one in.
TEST(FolderLock, TheFileOfAnotherRunIsNotRemoved) {
  const TemporaryFolder folder;
  const std::string path = folder.path();
  std::optional<FolderLock> first(std::in_place, path);
  std::filesystem::remove(path + "/lock");
  std::optional<FolderLock> second(std::in_place, path);
  first.reset();
  EXPECT_TRUE(std::filesystem::exists(path + "/lock"));
  EXPECT_TRUE(throws_with<FileError>([&] { FolderLock{path}; }, "is taken by another run"));
  second.reset();
  EXPECT_FALSE(std::filesystem::exists(path + "/lock"));
}

}  // namespace
}  // namespace lockstep
