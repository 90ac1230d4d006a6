#include "lockstep/datasets/file_bytes.h"

#include <gtest/gtest.h>

#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>

#include "lockstep/datasets/mapped_files.h"
#include "lockstep/tests/support/temporary_folder.h"

namespace lockstep {
namespace {

constexpr uintmax_t kMapped = 65u << 20;

/// A sparse file of zeros, large enough to be mapped.
std::string sparse_file(const testing::TemporaryFolder& folder, const char* name) {
  std::string path = folder.write(name, "");
  std::filesystem::resize_file(path, kMapped);
  return path;
}

TEST(FileBytesDeathTest, AMappedFileThatBecomesShorterEndsTheProcessWithItsNameAndTheByte) {
  const testing::TemporaryFolder folder;
  const std::string path = sparse_file(folder, "shrinks"), other = sparse_file(folder, "stays");
  const auto read_what_has_gone = [&] {
    tell_faults_of_mapped_files();
    const FileBytes stays(other), shrinks(path);
    { const FileBytes gone_again(other); }
    std::filesystem::resize_file(path, 4096);
    const volatile char* const bytes = shrinks.bytes().data();
    if (bytes[100] == 0 && bytes[8192 + 5] == 0) std::_Exit(3);
  };
  EXPECT_EXIT(read_what_has_gone(), ::testing::ExitedWithCode(1),
              "lockstep: '.*shrinks' can no longer be read at byte 8197: it was truncated");
}

TEST(FileBytesDeathTest, AnotherBusErrorEndsTheProcessAsItDoesWithoutTheHandler) {
  EXPECT_EXIT(
      {
        tell_faults_of_mapped_files();
        std::raise(SIGBUS);
        std::raise(SIGBUS);
      },
      ::testing::KilledBySignal(SIGBUS), "");
}

}  // namespace
}  // namespace lockstep
