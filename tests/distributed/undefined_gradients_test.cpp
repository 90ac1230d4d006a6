// Backwards that give a parameter an undefined gradient: it counts as zeros.

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <string>

#include <ATen/ATen.h>

#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/models/recompute.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/distributed/reducer_nets.h"

namespace lockstep {
namespace {

using testing::all_equal_to;
using testing::NoGradient;

/// The reduced gradients of all parameters, on every rank, by name.
std::map<std::string, at::Tensor> whole_gradients(const DistributedDataParallel& ddp) {
  std::map<std::string, at::Tensor> result;
  for (const ParamAndGradBuffer* buffer : ddp.buffers()) {
    const at::Tensor flat = at::zeros({buffer->layout().numel}, at::kDouble);
    for (const ElementRange& range : buffer->owned())
      flat.slice(0, range.start, range.end).copy_(buffer->held_grads(range));
    if (ddp.is_sharded())
      all_reduce(testing::replicas(ddp.parallel_state()), flat, ReduceOp::sum, "gradients").wait();
    for (size_t i = 0; i < buffer->params().size(); ++i) {
      const ParamLayout::Slot& slot = buffer->layout().slots[i];
      result[buffer->params()[i].name] = flat.slice(0, slot.start, slot.end);
    }
  }
  return result;
}

using Loss = std::function<at::Tensor(const at::Tensor& used, const at::Tensor& unused)>;

const std::vector<std::pair<const char*, Loss>> kLossesWithoutTheSecond = {
    {"a function without a gradient",
     [](const at::Tensor& used, const at::Tensor& unused) {
       return used.sum() + NoGradient::apply(unused).sum();
     }},
    {"a recomputed function that reads it", [](const at::Tensor& used, const at::Tensor& unused) {
       return recompute(
           [&](const std::vector<at::Tensor>& in) {
             (void)unused.sum();
             return (in[0] * used).sum();
           },
           {at::ones({6}, at::kDouble)});
     }}};

/// One step with gradients and one in which the second parameter's is undefined.
void take_steps(const ParallelState& state, ShardingStrategy strategy, bool set_to_none,
                const Loss& loss, const std::string& what) {
  const auto params = testing::named({at::ones({6}, at::kDouble), at::ones({6}, at::kDouble)});
  DistributedDataParallelConfig config;
  config.calculate_per_token_loss = false;
  config.use_distributed_optimizer = strategy != ShardingStrategy::no_shard;
  config.data_parallel_sharding_strategy = strategy;
  DistributedDataParallel ddp(params, state, config);
  const auto rank = static_cast<double>(state.rank());
  const at::Tensor &used = params[0].tensor, &unused = params[1].tensor;
  const auto expect = [&](double of_used, double of_unused) {
    ddp.finish_grad_sync();
    const auto gradients = whole_gradients(ddp);
    EXPECT_TRUE(all_equal_to(gradients.at("p0"), of_used)) << what;
    EXPECT_TRUE(all_equal_to(gradients.at("p1"), of_unused)) << what;
    ddp.zero_grad_buffer();
    for (const NamedParameter& param : params)
      if (set_to_none) param.tensor.mutable_grad().reset();
  };
  ddp.zero_grad_buffer();
  ((used + unused * 2).sum() * (1 + rank)).backward();
  expect(1.5, 3);
  (loss(used, unused) * (1 + rank)).backward();
  expect(1.5, 0);
  {
    const auto guard = ddp.no_sync();
    ((used + unused * 2).sum() * (1 + rank)).backward();
  }
  (loss(used, unused) * (1 + rank)).backward();
  expect(3, 3);
}

TEST(UndefinedGradients, CountAsZerosWhateverHoldsTheGradients) {
  for (const auto& [name, loss] : kLossesWithoutTheSecond)
    for (const ShardingStrategy strategy :
         {ShardingStrategy::no_shard, ShardingStrategy::optim, ShardingStrategy::optim_grads,
          ShardingStrategy::optim_grads_params})
      for (const bool set_to_none : {false, true})
        testing::run_ranks(2, [&, &text = name, &of = loss](const ParallelState& state) {
          take_steps(state, strategy, set_to_none, of,
                     std::string(text) + ", " + to_string(strategy) +
                         (set_to_none ? ", set to none" : ""));
        });
}

}  // namespace
}  // namespace lockstep
