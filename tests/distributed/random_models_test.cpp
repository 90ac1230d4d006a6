// 1,000 random models on several ranks, with every setting of buckets. Gradients are sums of small
// integers, so they are exact, and an oracle can compute them independently.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <random>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

using testing::run_ranks;

/// A number below `bound`; generators in equal states give it on every rank.
int64_t below(std::mt19937& random, int64_t bound) {
  return static_cast<int64_t>(random() % static_cast<uint32_t>(bound));
}

struct RandomParam {
  NamedParameter named;
  int64_t uses = 1;
  bool used_by_all = true;  ///< false: only by even ranks
};

struct RandomModel {
  std::vector<RandomParam> params;
  DistributedDataParallelConfig config;
  int64_t microbatches = 1;

  RandomModel(std::mt19937& random, bool experts) {
    const auto chance = [&](int64_t in) { return below(random, in) == 0; };
    config.use_distributed_optimizer = chance(2);
    config.overlap_grad_reduce = chance(2);
    config.pad_buckets_for_high_nccl_busbw = config.use_distributed_optimizer && chance(8);
    config.calculate_per_token_loss = true;  // sums, which are exact even in 16 bits
    config.grad_reduce_in_fp32 = !chance(4);
    config.allow_unused_parameters = chance(2);
    if (chance(3)) config.num_buckets = 1 + below(random, 5);
    if (!config.num_buckets && chance(2)) config.bucket_size = 1 + below(random, 500);
    microbatches = 1 + below(random, 3);
    const int64_t count = 1 + below(random, 10);
    for (int64_t i = 0; i < count; ++i) add_param(random, i, experts);
    draw_strategy(random);
  }

  bool lends_gradients() const {
    return config.data_parallel_sharding_strategy == ShardingStrategy::optim_grads ||
           shards_parameters();
  }
  bool shards_parameters() const {
    return config.data_parallel_sharding_strategy == ShardingStrategy::optim_grads_params;
  }

  std::vector<NamedParameter> named() const {
    std::vector<NamedParameter> result;
    for (const RandomParam& param : params) result.push_back(param.named);
    return result;
  }

 private:
  void draw_strategy(std::mt19937& random) {
    using enum ShardingStrategy;
    if (!config.use_distributed_optimizer || !config.overlap_grad_reduce) return;
    config.data_parallel_sharding_strategy =
        std::array{optim, optim_grads, optim_grads_params}[below(random, 3)];
    if (shards_parameters()) config.num_buckets.reset();
  }

  void add_param(std::mt19937& random, int64_t index, bool experts) {
    const auto chance = [&](int64_t in) { return below(random, in) == 0; };
    RandomParam param;
    const auto dtype =
        std::array{at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}[below(random, 4)];
    std::vector<int64_t> shape = {1 + below(random, 20)};
    if (chance(2)) shape.push_back(1 + below(random, 20));
    const bool trained = index == 0 || !chance(6);
    param.named.name = "p" + std::to_string(index);
    param.named.tensor = at::ones(shape, dtype).requires_grad_(trained);
    param.named.description.is_expert = experts && chance(3);
    if (chance(6)) param.named.description.tie = Tie{.name = param.named.name};
    param.uses = 1 + below(random, 2);
    param.used_by_all = !(config.allow_unused_parameters && chance(4));
    params.push_back(std::move(param));
  }
};

/// The factors of `rank` for parameter `index` in a micro-batch: integers from -2 to 2.
at::Tensor coefficients(const RandomParam& param, size_t index, int64_t rank, int64_t microbatch) {
  const int64_t shift = static_cast<int64_t>(index) * 3 + rank * 5 + microbatch * 7;
  const at::Tensor numbers = at::arange(param.named.tensor.numel()) * (rank + 1) + shift;
  return (numbers.remainder(5) - 2).view(param.named.tensor.sizes());
}

bool is_used(const RandomParam& param, int64_t rank) { return param.used_by_all || rank % 2 == 0; }

void run_backwards(const RandomModel& model, DistributedDataParallel& ddp, int64_t rank) {
  for (int64_t m = 0; m < model.microbatches; ++m) {
    std::optional<DistributedDataParallel::NoSyncGuard> guard;
    if (m + 1 < model.microbatches) guard.emplace(ddp.no_sync());
    at::Tensor loss = at::zeros({}, at::kDouble).requires_grad_(true);
    for (size_t i = 0; i < model.params.size(); ++i)
      for (int64_t use = 0; use < model.params[i].uses; ++use) {
        const at::Tensor& tensor = model.params[i].named.tensor;
        const at::Tensor term =  // on every rank, because reading may gather
            (tensor * coefficients(model.params[i], i, rank, m).to(tensor.scalar_type()))
                .to(at::kDouble)
                .sum();
        if (is_used(model.params[i], rank)) loss = loss + term;
      }
    loss.backward();
  }
}

/// The sum over `ranks` of the gradients of parameter `index`, computed without autograd.
at::Tensor expected_gradient(const RandomModel& model, size_t index, const RankList& ranks) {
  const RandomParam& param = model.params[index];
  at::Tensor sum = at::zeros(param.named.tensor.sizes(), at::kDouble);
  for (const int64_t rank : ranks)
    for (int64_t m = 0; m < model.microbatches && is_used(param, rank); ++m)
      sum += coefficients(param, index, rank, m) * param.uses;
  return sum;
}

/// The gradients that this rank owns in a buffer; zeros elsewhere.
at::Tensor owned_values(const ParamAndGradBuffer& buffer) {
  at::Tensor values = at::zeros({buffer.layout().numel}, at::kDouble);
  for (const ElementRange& range : buffer.owned())
    values.slice(0, range.start, range.end).copy_(buffer.held_grads(range));
  return values;
}

/// Marks the elements of a buffer that this rank owns.
at::Tensor owned_mask(const ParamAndGradBuffer& buffer) {
  at::Tensor mask = at::zeros({buffer.layout().numel}, at::kInt);
  for (const ElementRange& range : buffer.owned()) mask.slice(0, range.start, range.end).add_(1);
  return mask;
}

void check_gradients(const RandomModel& model, const DistributedDataParallel& ddp,
                     const std::string& what) {
  const ParallelState& state = ddp.parallel_state();
  for (const auto& buffer : ddp.buffers()) {
    const at::Tensor mask = owned_mask(*buffer), values = owned_values(*buffer);
    const bool expert = buffer->params().front().description.is_expert;
    const ProcessGroup group = state.group(expert ? GroupKind::expert_dp : GroupKind::dp_cp);
    for (size_t i = 0; i < buffer->params().size(); ++i) {
      const size_t index = std::stoul(buffer->params()[i].name.substr(1));
      const auto& slot = buffer->layout().slots[i];
      const at::Tensor owned = mask.slice(0, slot.start, slot.end);
      const at::Tensor found = values.slice(0, slot.start, slot.end);
      const at::Tensor wanted = expected_gradient(model, index, group.ranks()).flatten();
      EXPECT_TRUE(at::equal(found, wanted * owned)) << what << ", parameter " << index;
    }
    const at::Tensor owners = mask.clone();
    all_reduce(group, owners, ReduceOp::sum, "owners").wait();
    const int64_t copies =
        buffer->is_sharded() ? state.grids().sizes().optimizer_instances : group.size();
    EXPECT_TRUE(owners.eq(copies).all().item<bool>()) << what;
  }
}

using Call = std::tuple<std::string, std::string, int64_t>;  // operation, group, bytes

std::vector<Call> planned_calls(const DistributedDataParallel& ddp) {
  std::vector<Call> calls, over_instances;
  const int64_t instances = ddp.parallel_state().grids().sizes().optimizer_instances;
  const auto add = [](std::vector<Call>& list, const char* operation, const ProcessGroup& group,
                      int64_t bytes) {
    if (group.size() > 1) list.emplace_back(operation, group.name(), bytes);
  };
  for (const auto& bucket : ddp.buckets()) {
    add(calls, ddp.is_sharded() ? "reduce_scatter (sum)" : "all_reduce (sum)", bucket.group,
        bucket.bytes);
    if (ddp.is_sharded() && instances > 1)
      add(over_instances, "all_reduce (sum)", bucket.instances.value(),
          bucket.bytes / bucket.group.size());
  }
  calls.insert(calls.end(), over_instances.begin(), over_instances.end());
  return calls;
}

/// `calls`: the calls of this rank so far.
void check_model(const ParallelState& state, const std::vector<CollectiveRecord>& calls,
                 uint32_t seed) {
  std::mt19937 random(seed);
  const RandomModel model(random, state.grids().sizes().expert > 1);
  const std::string what = "seed " + std::to_string(seed);
  DistributedDataParallel ddp(model.named(), state, model.config);
  for (int step = 0; step < 2; ++step) {
    ddp.zero_grad_buffer();
    const size_t before = calls.size();
    run_backwards(model, ddp, state.rank());
    ddp.finish_grad_sync();
    std::vector<Call> found, planned = planned_calls(ddp);
    for (size_t i = before; i < calls.size(); ++i)
      if (!model.shards_parameters() || calls[i].operation != "all_gather")
        found.emplace_back(calls[i].operation, calls[i].group, calls[i].bytes);
    if (model.lends_gradients()) {  // a bucket may end before the next one starts
      std::sort(found.begin(), found.end());
      std::sort(planned.begin(), planned.end());
    }
    EXPECT_EQ(found, planned) << what;
    check_gradients(model, ddp, what);
  }
}

TEST(RandomModels, GradientsOwnersAndCollectivesAreThoseExpected) {
  struct World {
    int64_t ranks, experts, instances;
  };
  uint32_t seed = 0;
  for (const World& world : {World{1, 1, 1}, World{2, 1, 1}, World{3, 1, 1}, World{4, 1, 1},
                             World{4, 1, 2}, World{4, 2, 1}, World{4, 2, 2}, World{6, 3, 1}}) {
    std::vector<std::vector<CollectiveRecord>> calls(static_cast<size_t>(world.ranks));
    const auto calls_of = [&](int64_t rank) -> auto& { return calls[static_cast<size_t>(rank)]; };
    testing::RankThreadOptions options;
    options.sizes.expert = world.experts;
    options.sizes.optimizer_instances = world.instances;
    options.observer = [&](const CollectiveRecord& call) { calls_of(call.rank).push_back(call); };
    run_ranks(
        world.ranks,
        [&](const ParallelState& state) {
          for (uint32_t i = 0; i < 125; ++i) {
            calls_of(state.rank()).clear();
            check_model(state, calls_of(state.rank()), seed + i);
          }
        },
        options);
    seed += 125;
  }
}

}  // namespace
}  // namespace lockstep
