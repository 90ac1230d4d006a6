#include "lockstep/training/memory_use.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <vector>

#include "lockstep/tests/support/temporary_folder.h"

namespace lockstep {
namespace {

TEST(MemoryUse, GrowsWithWhatIsTouchedAndKeepsThePeak) {
  constexpr int64_t kBytes = 64 << 20;
  const MemoryUse before = memory_use(c10::kCPU);
  MemoryUse during;
  {
    std::vector<char> touched(kBytes, 1);
    during = memory_use(c10::kCPU);
    EXPECT_EQ(touched[kBytes / 2], 1);
  }
  const MemoryUse after = memory_use(c10::kCPU);
  EXPECT_GT(before.bytes, 0);
  EXPECT_GE(during.bytes, before.bytes + kBytes / 2);
  EXPECT_GE(during.peak_bytes, during.bytes);
  EXPECT_LT(after.bytes, during.bytes);
  EXPECT_GE(after.peak_bytes, before.bytes + kBytes / 2);
}

TEST(MemoryUse, IsWhatTheKernelTells) {
  int64_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  const double expected = static_cast<double>(resident * ::sysconf(_SC_PAGESIZE));
  EXPECT_NEAR(static_cast<double>(memory_use(c10::kCPU).bytes) / expected, 1, 0.1);
}

TEST(GpuModel, IsKnownWhereAllGpusOfTheHostAreOfOne) {
  const testing::TemporaryFolder folder;
  const auto gpu = [&](const std::string& address, const std::string& text) {
    std::filesystem::create_directories(folder.path() / address);
    folder.write(address + "/information", text);
  };
  EXPECT_EQ(gpu_model(folder.path()), "");
  EXPECT_EQ(gpu_model(folder.path() / "none"), "");
  const std::string text = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\n";
  gpu("0000:04:00.0", text);
  EXPECT_EQ(gpu_model(folder.path()), "NVIDIA H100 80GB HBM3");
  gpu("0000:05:00.0", text);
  EXPECT_EQ(gpu_model(folder.path()), "NVIDIA H100 80GB HBM3");
  gpu("0000:06:00.0", "Model: NVIDIA A2");
  EXPECT_EQ(gpu_model(folder.path()), "");
  gpu("0000:06:00.0", "IRQ: 18\n");
  EXPECT_EQ(gpu_model(folder.path()), "");
}

}  // namespace
}  // namespace lockstep
