// The audit on the asynchronous device over a backend with NCCL's rules: the measured values match
// the computed ones, with sums and with averages.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/optimizer/audit.h"
#include "lockstep/tests/support/device/device_ranks.h"
#include "lockstep/tests/support/small_net.h"

namespace lockstep::testing {
namespace {

TEST(DeviceAudit, MeasuresWhatIsWorkedOut) {
  use_lagging_device();
  for (const bool averages : {false, true})
    for (const bool sharded : {false, true})
      run_device_ranks(3, [&](const ParallelState& state) {
        SmallNet net(3, at::kDouble, state.device());
        DistributedDataParallelConfig config;
        config.calculate_per_token_loss = !averages;
        config.use_distributed_optimizer = sharded;
        config.overlap_grad_reduce = true;
        config.bucket_size = 20;
        DistributedDataParallel ddp(net, state, config);
        const AuditedModel model = {
            .models = {&ddp}, .modules = {&net}, .ddp = config, .num_microbatches = 2};
        const auto found = audit_differences(expected_audit(model), audit(model));
        EXPECT_TRUE(found.empty()) << fmt::format("{}", fmt::join(found, "\n"));
      });
}

}  // namespace
}  // namespace lockstep::testing
