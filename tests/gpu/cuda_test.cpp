// What only a GPU can show. Every test is skipped where there is none.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/kernels/adamw.h"
#include "lockstep/kernels/sum_of_squares.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/devices.h"
#include "lockstep/tests/support/adamw_scalars.h"
#include "lockstep/tests/support/small_net.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/trainer.h"

namespace lockstep {
namespace {

const c10::Device kCuda(c10::kCUDA, 0);

class Cuda : public ::testing::Test {
 protected:
  void SetUp() override {
    if (cuda_device_count() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

at::Tensor wave(int64_t n, double speed, at::ScalarType dtype) {
  return at::sin(at::arange(n, at::kDouble) * speed).to(dtype);
}

TEST_F(Cuda, AdamWEqualsTheCpu) {
  const std::vector<kernels::UpdateSegment> segments = {
      {0, 3}, {3, 3000}, {3100, 3101}, {4000, 8096}, {8097, 100003}};
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    const int64_t n = 100003;
    std::vector<at::Tensor> cpu = {wave(n, 0.3, dtype), wave(n, 0.7, dtype),
                                   wave(n, 0.2, dtype) * 0.1, wave(n, 0.9, dtype).square()};
    std::vector<at::Tensor> gpu;
    for (const at::Tensor& t : cpu) gpu.push_back(t.to(kCuda));
    const bool low = dtype == at::kFloat;
    const at::Tensor cpu_low = low ? at::zeros({n}, at::kBFloat16) : at::Tensor();
    const at::Tensor gpu_low = low ? cpu_low.to(kCuda) : at::Tensor();
    for (int step = 1; step <= 3; ++step) {
      kernels::AdamWScalars scalars = testing::scalars_of_step(step);
      scalars.grad_scale = 0.5;
      kernels::adamw(cpu[0], cpu[1], cpu[2], cpu[3], cpu_low, segments, scalars);
      kernels::adamw(gpu[0], gpu[1], gpu[2], gpu[3], gpu_low, segments, scalars);
    }
    const double tolerance = low ? 1e-5 : 1e-12;
    for (size_t i = 0; i < cpu.size(); ++i)
      EXPECT_TRUE(at::allclose(gpu[i].cpu(), cpu[i], tolerance, tolerance)) << i;
    if (!low) continue;
    EXPECT_TRUE(at::allclose(gpu_low.cpu().to(at::kFloat), gpu[0].cpu(), 0.005, 1e-30));
  }
}

TEST_F(Cuda, SumOfSquaresEqualsTheCpuAndIsTheSameInEveryRun) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16})
    for (const int64_t n : {0, 1, 257, 1 << 20}) {
      const at::Tensor x = wave(n, 0.37, dtype), on_gpu = x.to(kCuda);
      const double expected = kernels::sum_of_squares(x).item<double>();
      const at::Tensor first = kernels::sum_of_squares(on_gpu);
      EXPECT_TRUE(first.is_cuda());
      EXPECT_NEAR(first.item<double>(), expected, 1e-12 * (1 + expected));
      EXPECT_EQ(kernels::sum_of_squares(on_gpu).item<double>(), first.item<double>());
    }
}

TEST_F(Cuda, DataParallelStepLeavesTheSameGradientsAsTheCpu) {
  std::vector<std::vector<at::Tensor>> gradients;
  for (const c10::Device device : {c10::Device(c10::kCPU), kCuda}) {
    testing::SmallNet net;
    net.to(device);
    DistributedDataParallel ddp(net, ParallelState::single_process(device));
    {
      const auto guard = ddp.no_sync();
      net.loss(testing::SmallNet::samples(0, 4).to(device)).backward();
    }
    net.loss(testing::SmallNet::samples(4, 4).to(device)).backward();
    finalize_model_grads({&ddp}, at::full({}, 8));
    gradients.emplace_back();
    for (const at::Tensor& p : net.parameters()) gradients.back().push_back(p.grad().cpu());
  }
  for (size_t i = 0; i < gradients[0].size(); ++i)
    EXPECT_TRUE(at::allclose(gradients[0][i], gradients[1][i], 1e-11)) << i;
}

TEST_F(Cuda, TrainingFollowsTheCpu) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.write("text", testing::synthetic_text());
  const auto losses = [&](c10::Device device, const std::string& precision) {
    const Config config = parse_config(
        "model { num_layers: 2 hidden_size: 32 num_attention_heads: 4 seq_length: 32 } "
        "optimizer { lr: 0.01 } train { micro_batch_size: 4 global_batch_size: 8 train_iters: 10 }",
        "test", {"data.path=" + path, "train.precision=" + precision});
    Trainer trainer(config, ParallelState::single_process(device));
    std::vector<double> values;
    for (int i = 0; i < 10; ++i) values.push_back(trainer.train_step().lm_loss);
    values.push_back(trainer.validate().validation_loss);
    return values;
  };
  for (const auto& [precision, tolerance] : std::vector<std::pair<std::string, double>>{
           {"fp64", 1e-10}, {"fp32", 1e-3}, {"bf16", 0.02}}) {
    const auto cpu = losses(c10::kCPU, precision), cuda = losses(kCuda, precision);
    for (size_t i = 0; i < cpu.size(); ++i)
      EXPECT_NEAR(cuda[i], cpu[i], tolerance * cpu[i]) << precision << ", " << i;
  }
}

}  // namespace
}  // namespace lockstep
