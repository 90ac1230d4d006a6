// Public calls on models whose gradients, and parameters too, are sharded over the data-parallel
// ranks in every way: what each rank holds afterwards.

#include <gtest/gtest.h>

#include <map>

#include <torch/nn/utils/clip_grad.h>

#include "lockstep/optimizer/clip_grads.h"
#include "lockstep/optimizer/unscale_grads.h"
#include "lockstep/tests/optimizer/sharded_run.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

using testing::is_readable;
using testing::kTokensOfStep;
using testing::run_ranks;
using testing::ShardedRun;
using testing::Training;
using testing::UnitNet;
using testing::Weights;

constexpr ShardingStrategy kStrategies[] = {ShardingStrategy::no_shard, ShardingStrategy::optim,
                                            ShardingStrategy::optim_grads,
                                            ShardingStrategy::optim_grads_params};

using ByName = std::map<std::string, at::Tensor>;

/// Compares all the reduced gradients that this rank holds with `expected`; the rest of a buffer is
/// padding. `sharing`: the ranks that each hold another part of them.
void expect_held(const DistributedDataParallel& ddp, const ByName& expected, int64_t sharing,
                 const std::string& what) {
  int64_t found = 0, all = 0;
  for (const ParamAndGradBuffer* buffer : ddp.buffers()) {
    const ParamLayout& layout = buffer->layout();
    const at::Tensor wanted = at::zeros({layout.numel}, at::kDouble);
    for (size_t i = 0; i < buffer->params().size(); ++i)
      wanted.slice(0, layout.slots[i].start, layout.slots[i].end)
          .copy_(expected.at(buffer->params()[i].name).reshape(-1));
    for (const ElementRange& range : buffer->reduced()) {
      EXPECT_TRUE(at::allclose(buffer->held_grads(range), wanted.slice(0, range.start, range.end),
                               1e-11, 1e-14))
          << what << ", buffer of '" << buffer->params().front().name << "' from " << range.start;
      found += range.numel();
    }
    all += layout.numel;
  }
  EXPECT_EQ(found * sharing, all) << what;
}

ByName gradients_times(const UnitNet& net, double factor) {
  ByName gradients;
  for (const auto& param : net.named_parameters())
    gradients[param.key()] = param.value().grad() * factor;
  return gradients;
}

/// Calls `body` in every setting with a model whose gradients are final, and with the number of
/// ranks that each hold another part of them.
void with_reduced_gradients(const std::function<void(DistributedDataParallel&, int64_t sharing,
                                                     const std::string& what)>& body) {
  for (const int64_t ranks : {2, 3})
    run_ranks(ranks, [&](const ParallelState& state) {
      for (const ShardingStrategy strategy : kStrategies)
        for (const bool forced : {false, true}) {
          const bool lends = strategy == ShardingStrategy::optim_grads ||
                             strategy == ShardingStrategy::optim_grads_params;
          if (lends && forced) continue;  // refused: no rank keeps all
          Training training(state, {.strategy = strategy, .bucket_size = 40});
          if (forced) training.ddp.set_force_all_reduce(true);
          training.backwards();
          finalize_model_grads({&training.ddp}, at::full({}, kTokensOfStep / ranks, at::kLong));
          const bool whole = forced || strategy == ShardingStrategy::no_shard;
          body(training.ddp, whole ? 1 : ranks,
               to_string(strategy) + std::string(forced ? ", all reduced, " : ", ") +
                   std::to_string(ranks) + " ranks");
        }
    });
}

/// A model in one process after the same backward.
struct Plain {
  Plain() : net(/*tied=*/false) {
    (net.loss(0, kTokensOfStep) / static_cast<double>(kTokensOfStep)).backward();
  }
  UnitNet net;
};

TEST(ShardedCalls, ClippingScalesAllThatEachRankHolds) {
  const Plain plain;
  const ByName before = gradients_times(plain.net, 1);
  const double norm = torch::nn::utils::clip_grad_norm_(plain.net.parameters(), 0.05);
  ASSERT_GT(norm, 0.1);
  const ByName clipped = gradients_times(plain.net, 1);
  with_reduced_gradients(
      [&](DistributedDataParallel& ddp, int64_t sharing, const std::string& what) {
        EXPECT_NEAR(clip_grad_norm_({&ddp}, 10 * norm), norm, 1e-12 * norm) << what;
        expect_held(ddp, before, sharing, what + ", not clipped");
        EXPECT_NEAR(clip_grad_norm_({&ddp}, 0.05), norm, 1e-12 * norm) << what;
        expect_held(ddp, clipped, sharing, what);
        EXPECT_NEAR(grad_norm({&ddp}).item<double>(), 0.05, 1e-6) << what;
      });
}

TEST(ShardedCalls, UnscalingScalesAllThatEachRankHolds) {
  const Plain plain;
  const ByName unscaled = gradients_times(plain.net, 1. / 1024);
  with_reduced_gradients(
      [&](DistributedDataParallel& ddp, int64_t sharing, const std::string& what) {
        EXPECT_FALSE(found_inf({&ddp}, 1. / 1024)) << what;
        expect_held(ddp, unscaled, sharing, what);
      });
}

TEST(ShardedCalls, ParametersAreTheRoundedMasterWeightsAfterTheyWereWritten) {
  const auto value_of = [](const std::string& name, int64_t numel) {
    return (at::arange(numel, at::kDouble) * 0.37 + static_cast<double>(name.size())).sin();
  };
  run_ranks(3, [&](const ParallelState& state) {
    for (const ShardingStrategy strategy : kStrategies)
      for (const bool ahead : {false, true}) {
        if (ahead && strategy == ShardingStrategy::no_shard) continue;
        const ShardedRun run{.strategy = strategy, .ahead = ahead};
        Training training(state, run, at::kBFloat16);
        training.step();
        for (const StateSlice& slice : training.optimizer->state_slices()) {
          ASSERT_EQ(slice.values[0].name, "master");
          at::Tensor(slice.values[0].tensor)
              .copy_(value_of(slice.parameter, c10::multiply_integers(slice.shape))
                         .slice(0, slice.range.start, slice.range.end));
        }
        training.optimizer->apply_master_weights();
        const Weights found = training.weights();
        const auto params = training.net.named_parameters();
        for (size_t i = 0; i < found.size(); ++i) {
          const at::Tensor master = value_of(params[i].key(), found[i].numel());
          EXPECT_TRUE(at::equal(found[i].reshape(-1), master.to(at::kFloat).to(at::kBFloat16)))
              << run.text() << ", " << params[i].key();
        }
      }
  });
}

/// The number of parameters whose memory exists.
int64_t readable(const UnitNet& net) {
  int64_t count = 0;
  for (const at::Tensor& param : net.parameters()) count += is_readable(param) ? 1 : 0;
  return count;
}

TEST(ShardedCalls, ABroadcastGivesTheParametersOfRankZeroAndClosesThemAgain) {
  run_ranks(3, [](const ParallelState& state) {
    for (const ShardingStrategy strategy : kStrategies)
      for (const bool ahead : {false, true}) {
        if (ahead && strategy == ShardingStrategy::no_shard) continue;
        const ShardedRun run{.strategy = strategy, .ahead = ahead};
        Training training(state, run), twin(state, run);
        const auto expect = [&](const Weights& wanted, const char* when) {
          const auto params = static_cast<int64_t>(wanted.size());
          EXPECT_EQ(readable(training.net),
                    strategy == ShardingStrategy::optim_grads_params ? 0 : params)
              << run.text() << ", " << when;
          const Weights found = training.weights();
          for (size_t i = 0; i < wanted.size(); ++i)
            EXPECT_TRUE(at::equal(found[i], wanted[i]))
                << run.text() << ", " << when << ", parameter " << i;
        };
        for (int step = 0; step < 2; ++step) training.step(), twin.step();
        training.ddp.broadcast_params();  // closed, or with a gather under way
        Weights wanted = twin.weights();
        expect(wanted, "trained");

        training.ddp.unshard();
        {
          const at::NoGradGuard no_grad;
          for (const at::Tensor& param : training.net.parameters())
            at::Tensor(param).add_(static_cast<double>(1 + state.rank()));
          for (at::Tensor& one : wanted) one += 1;
        }
        training.ddp.broadcast_params();
        expect(wanted, "changed on each rank");
      }
  });
}

/// The memory of a bucket held other gradients before.
TEST(ShardedCalls, ABucketWithoutAnyGradientOnARankCountsAsZerosThere) {
  const auto coefficient = [](size_t param, int64_t rank, int step) {
    return static_cast<double>(1 + static_cast<int64_t>(param) * 7 + rank * 100 + step * 1000);
  };
  // Layer 1 fills whole buckets. It has no gradient on rank 0, then on rank 1, then on both.
  const auto is_used = [](const std::string& name, int64_t rank, int step) {
    return step == 0 || !name.starts_with("layers.1.") || (step < 3 && rank != step - 1);
  };
  run_ranks(2, [&](const ParallelState& state) {
    for (const ShardingStrategy strategy : kStrategies)
      for (const int64_t microbatches : {1, 2}) {
        UnitNet net(/*tied=*/false);
        DistributedDataParallelConfig config =
            ShardedRun{.strategy = strategy, .bucket_size = 40}.ddp();
        config.allow_unused_parameters = true;
        DistributedDataParallel ddp(net, state, config);
        const auto params = net.named_parameters();
        for (int step = 0; step < 4; ++step) {
          const std::string what = to_string(strategy) + std::string(", step ") +
                                   std::to_string(step) + ", micro-batches " +
                                   std::to_string(microbatches);
          ddp.zero_grad_buffer();
          for (int64_t i = 0; i < microbatches; ++i) {
            std::optional<DistributedDataParallel::NoSyncGuard> guard;
            if (i + 1 < microbatches) guard.emplace(ddp.no_sync());
            at::Tensor loss = at::zeros({}, at::kDouble);
            for (size_t p = 0; p < params.size(); ++p) {
              const at::Tensor sum = params[p].value().sum();  // read on every rank
              if (is_used(params[p].key(), state.rank(), step))
                loss = loss + sum * coefficient(p, state.rank(), step);
            }
            loss.backward();
          }
          ddp.finish_grad_sync();
          ByName expected;
          for (size_t p = 0; p < params.size(); ++p) {
            double sum = 0;
            for (const int64_t rank : {0, 1})
              if (is_used(params[p].key(), rank, step)) sum += coefficient(p, rank, step);
            expected[params[p].key()] = at::full(
                params[p].value().sizes(), sum * static_cast<double>(microbatches), at::kDouble);
          }
          expect_held(ddp, expected, strategy == ShardingStrategy::no_shard ? 1 : 2, what);
        }
      }
  });
}

}  // namespace
}  // namespace lockstep
