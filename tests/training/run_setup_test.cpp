#include "lockstep/training/run_setup.h"

#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

LaunchEnvironment local_rank(int rank, int ranks_of_host) {
  LaunchEnvironment environment;
  environment.local_rank = rank;
  environment.local_world_size = ranks_of_host;
  return environment;
}

c10::Device cuda(int index) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

TEST(ChooseDevice, RankIOfAHostTakesDeviceI) {
  for (const auto choice : {DeviceChoice::auto_, DeviceChoice::cuda})
    for (const int64_t visible : {4, 8})
      for (int rank = 0; rank < 4; ++rank)
        EXPECT_EQ(choose_device(choice, local_rank(rank, 4), visible), cuda(rank));
}

TEST(ChooseDevice, ARankThatSeesOneDeviceTakesIt) {
  for (const auto choice : {DeviceChoice::auto_, DeviceChoice::cuda})
    for (int rank = 0; rank < 8; ++rank)
      EXPECT_EQ(choose_device(choice, local_rank(rank, 8), 1), cuda(0));
}

TEST(ChooseDevice, TheCpuIsTakenWhereItIsAskedForOrNothingElseIsThere) {
  EXPECT_EQ(choose_device(DeviceChoice::cpu, local_rank(0, 2), 8), c10::kCPU);
  EXPECT_EQ(choose_device(DeviceChoice::cpu, local_rank(0, 2), 0), c10::kCPU);
  EXPECT_EQ(choose_device(DeviceChoice::auto_, local_rank(1, 2), 0), c10::kCPU);
}

TEST(ChooseDevice, TooFewDevicesAreAnErrorAndNotTheCpu) {
  for (const auto choice : {DeviceChoice::auto_, DeviceChoice::cuda})
    EXPECT_TRUE(testing::throws_with<ConfigError>(
        [&] { choose_device(choice, local_rank(0, 4), 2); },
        "found visible CUDA devices: 2, ranks of this host: 4; allowed: a device for each rank"));
  EXPECT_TRUE(testing::throws_with<ConfigError>(
      [] { choose_device(DeviceChoice::cuda, local_rank(0, 1), 0); },
      "train.device = cuda: found visible CUDA devices: 0, ranks of this host: 1"));
}

TEST(UnusedGpus, AreToldWhereARunTakesTheCpuByItself) {
  const testing::TemporaryFolder folder;
  folder.write("0000:17:00.0", "");
  folder.write("0000:65:00.0", "");
  EXPECT_EQ(unused_gpus(DeviceChoice::auto_, c10::kCPU, folder.path()),
            "train.device = auto takes the CPU: the driver lists 2 GPUs, but this process sees no "
            "CUDA device (CUDA_VISIBLE_DEVICES, or a build without CUDA)");
  EXPECT_EQ(unused_gpus(DeviceChoice::cpu, c10::kCPU, folder.path()), "");
  EXPECT_EQ(unused_gpus(DeviceChoice::auto_, cuda(0), folder.path()), "");
  EXPECT_EQ(unused_gpus(DeviceChoice::auto_, c10::kCPU, folder.path() / "none"), "");
}

}  // namespace
}  // namespace lockstep
