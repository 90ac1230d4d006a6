// The all-gather of parameters after a step of the distributed optimizer, and what may be read
// meanwhile.

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/distributed_training.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::adamw_config;
using testing::kLayers;
using testing::reduce_gradients;
using testing::run_backwards;
using testing::run_ranks;
using testing::Setting;
using testing::SmallNet;
using testing::throws_with;

/// A step whose gathers have not been waited for.
class PendingGather : public ::testing::Test {
 protected:
  using Body = std::function<void(SmallNet&, DistributedDataParallel&)>;

  /// Runs `body` right after a step, without waiting for its gathers.
  static void after_a_step(const Body& body, int64_t ranks = 2) {
    run_ranks(ranks, [&](const ParallelState& state) {
      SmallNet net(kLayers);
      DistributedDataParallel ddp(net, state,
                                  Setting{.overlap_gather = true, .bucket_size = 1}.ddp());
      DistributedOptimizer optimizer({&ddp}, adamw_config());
      run_backwards(net, ddp, 0, 1, at::kDouble);
      reduce_gradients(ddp);
      optimizer.step();
      body(net, ddp);
    });
  }

  static void expect_refused(const at::Tensor& tensor) {
    EXPECT_TRUE(throws_with<c10::Error>([&] { tensor.const_data_ptr(); }, "finish_param_sync()"));
  }
};

TEST_F(PendingGather, ParametersCannotBeReadBehindTheGathersBack) {
  after_a_step([](SmallNet& net, DistributedDataParallel& ddp) {
    EXPECT_TRUE(ddp.param_sync_pending());
    for (const at::Tensor& param : net.parameters()) expect_refused(param);
    ddp.finish_param_sync();
    EXPECT_FALSE(ddp.param_sync_pending());
    for (const at::Tensor& param : net.parameters()) EXPECT_NO_THROW(param.const_data_ptr());
  });
}

TEST_F(PendingGather, AnOperatorWaitsForItsArgumentsAlone) {
  after_a_step([](SmallNet& net, DistributedDataParallel& ddp) {
    const auto params = net.parameters();
    const at::Tensor sum = params[0].sum() + at::stack({params[3].sum()}).sum();
    for (size_t i = 0; i < params.size(); ++i) {
      if (i == 0 || i == 3)
        EXPECT_NO_THROW(params[i].const_data_ptr());
      else
        expect_refused(params[i]);
    }
    ddp.finish_param_sync();
    EXPECT_EQ((params[0].sum() + params[3].sum()).item<double>(), sum.item<double>());
  });
}

TEST_F(PendingGather, AParameterWithoutElementsCanAlwaysBeRead) {
  run_ranks(2, [](const ParallelState& state) {
    SmallNet net(kLayers);
    const at::Tensor none = net.register_parameter("none", at::zeros({0, 3}, at::kDouble));
    DistributedDataParallelConfig config = Setting{.overlap_gather = true, .bucket_size = 1}.ddp();
    config.allow_unused_parameters = true;
    DistributedDataParallel ddp(net, state, config);
    DistributedOptimizer optimizer({&ddp}, adamw_config());
    run_backwards(net, ddp, 0, 1, at::kDouble);
    reduce_gradients(ddp);
    optimizer.step();
    EXPECT_TRUE(ddp.param_sync_pending());
    EXPECT_NO_THROW(none.const_data_ptr());
    EXPECT_EQ(none.sum().item<double>(), 0);
  });
}

TEST_F(PendingGather, AViewFromBeforeTheStepWaitsToo) {
  run_ranks(2, [&](const ParallelState& state) {
    SmallNet net(kLayers);
    DistributedDataParallel ddp(net, state,
                                Setting{.overlap_gather = true, .bucket_size = 1}.ddp());
    DistributedOptimizer optimizer({&ddp}, adamw_config());
    const at::Tensor view = net.parameters()[4].detach().t();
    run_backwards(net, ddp, 0, 1, at::kDouble);
    reduce_gradients(ddp);
    optimizer.step();
    const at::Tensor copy = view.clone();
    ddp.finish_param_sync();
    EXPECT_TRUE(at::equal(copy, net.parameters()[4].t()));
  });
}

TEST_F(PendingGather, ForwardOnAnotherThreadThrowsInsteadOfUsingStaleWeights) {
  after_a_step([](SmallNet& net, DistributedDataParallel& ddp) {
    std::string error;
    std::thread([&] {
      try {
        net.loss(SmallNet::samples(0, 2));
      } catch (const c10::Error& e) {
        error = e.what();
      }
    }).join();
    EXPECT_NE(error.find("finish_param_sync()"), std::string::npos) << error;
    ddp.finish_param_sync();
    EXPECT_NO_THROW(net.loss(SmallNet::samples(0, 2)));
  });
}

TEST_F(PendingGather, AGatherThatFailedLeavesNothingToRead) {
  const auto errors = testing::errors_of_ranks(2, [](const ParallelState& state) {
    SmallNet net(kLayers);
    DistributedDataParallel ddp(net, state, Setting{.overlap_gather = true}.ddp());
    if (state.rank() == 1) throw UsageError("rank 1 has had enough");
    ddp.start_param_sync(false, /*force_dispatch=*/true);
    for (int attempt = 0; attempt < 2; ++attempt)
      EXPECT_TRUE(throws_with<c10::Error>([&] { net.loss(SmallNet::samples(0, 2)); },
                                          "rank 1 has had enough"));
    EXPECT_TRUE(throws_with<CommunicationError>([&] { ddp.finish_param_sync(); }, "all_gather"));
    EXPECT_TRUE(throws_with<c10::Error>([&] { net.parameters()[0].const_data_ptr(); }, "rank 1"));
  });
  EXPECT_EQ(errors[1], "rank 1 has had enough");
}

/// For each gather, the number of buckets of the first rank that were updated when it started.
std::vector<int64_t> updated_at_gathers(bool overlap, at::ScalarType dtype, int64_t& buckets) {
  const DistributedDataParallel* stepping = nullptr;
  at::Tensor before;
  std::vector<int64_t> updated;
  testing::RankThreadOptions options;
  options.observer = [&](const CollectiveRecord& call) {
    if (call.rank != 0 || !stepping || call.operation != "all_gather") return;
    const ParamAndGradBuffer& buffer = *stepping->buffers()[0];
    updated.push_back(0);
    for (const ElementRange& owned : buffer.owned())
      updated.back() += !at::equal(buffer.param_data().slice(0, owned.start, owned.end),
                                   before.slice(0, owned.start, owned.end));
  };
  run_ranks(
      2,
      [&](const ParallelState& state) {
        SmallNet net(kLayers, dtype);
        DistributedDataParallel ddp(net, state,
                                    Setting{.overlap_gather = overlap, .bucket_size = 1}.ddp());
        DistributedOptimizer optimizer({&ddp}, adamw_config());
        run_backwards(net, ddp, 0, 1, dtype);
        reduce_gradients(ddp);
        if (state.rank() == 0) {
          before = ddp.buffers()[0]->param_data().clone();
          buckets = static_cast<int64_t>(ddp.buckets().size());
          stepping = &ddp;
        }
        optimizer.step();
        if (state.rank() == 0) stepping = nullptr;
        ddp.finish_param_sync();
      },
      options);
  return updated;
}

TEST_F(PendingGather, WithOverlapAGatherStartsWhenItsBucketIsUpdated) {
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16}) {
    int64_t buckets = 0;
    const std::vector<int64_t> overlapping = updated_at_gathers(true, dtype, buckets);
    ASSERT_EQ(buckets, 10);
    EXPECT_EQ(overlapping, (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}));
    EXPECT_EQ(updated_at_gathers(false, dtype, buckets), std::vector<int64_t>(10, 10));
  }
}

/// The calls with which a rank gathers its parameters: groups that it waits for, and gathers.
std::vector<std::string> gather_calls(const std::vector<CollectiveRecord>& calls) {
  std::vector<std::string> result;
  for (const CollectiveRecord& call : calls)
    if (call.label == "start of the parameter gather")
      result.push_back("wait for " + call.group);
    else if (call.operation == "all_gather")
      result.push_back(call.group + " " + call.label);
  return result;
}

/// Two stages with two model chunks each, on two data-parallel ranks.
TEST_F(PendingGather, AlignedStagesStartTheGathersOfAChunkTogether) {
  for (const bool align : {false, true}) {
    testing::CollectiveLog log;
    std::atomic<bool> has_begun[2] = {};  // the later stage's ranks
    std::atomic<int> early_gathers = 0;
    testing::RankThreadOptions threads;
    threads.sizes.pipeline = 2;
    threads.sizes.virtual_pipeline = 2;
    threads.log = &log;
    threads.observer = [&](const CollectiveRecord& call) {
      if (call.label.starts_with("parameters '") && call.rank < 2 && !has_begun[call.rank])
        ++early_gathers;
    };
    run_ranks(
        4,
        [&](const ParallelState& state) {
          const bool first_stage = state.rank() < 2;
          SmallNet nets[] = {SmallNet(2), SmallNet(3)};
          DistributedDataParallelConfig config =
              Setting{.overlap_gather = true, .bucket_size = 30}.ddp();
          config.align_param_gather = align;
          DistributedDataParallel first(nets[0], state, config);
          DistributedDataParallel second(nets[1], state, config, /*disable_bucketing=*/true);
          barrier(state.world(), "ready");
          size_t before = log.of_rank(state.rank()).size();
          if (!first_stage) {
            const auto patience = std::chrono::milliseconds(align ? 50 : 20'000);
            const auto until = std::chrono::steady_clock::now() + patience;
            while (early_gathers == 0 && std::chrono::steady_clock::now() < until)
              std::this_thread::sleep_for(std::chrono::milliseconds(1));
            has_begun[state.rank() - 2] = true;
          }
          std::vector<std::string> expected;
          for (DistributedDataParallel* chunk : {&first, &second}) {
            chunk->start_param_sync(/*force_sync=*/false, /*force_dispatch=*/true);
            if (align) expected.emplace_back("wait for pp");
            const auto buckets = chunk->buckets();
            EXPECT_EQ(buckets.size() > 1, first_stage && chunk == &first);
            for (auto bucket = buckets.rbegin(); bucket != buckets.rend(); ++bucket)
              expected.push_back("dp-cp parameters '" + bucket->parameters.back() + "' to '" +
                                 bucket->parameters.front() + "'");
          }
          const auto expect_calls = [&] {
            auto calls = log.of_rank(state.rank());
            calls.erase(calls.begin(), calls.begin() + static_cast<int64_t>(before));
            EXPECT_EQ(gather_calls(calls), expected);
            before += calls.size();
            first.finish_param_sync();
            second.finish_param_sync();
          };
          expect_calls();
          for (DistributedDataParallel* chunk : {&first, &second})
            chunk->update_params([](size_t, size_t) {});
          expect_calls();
        },
        threads);
    EXPECT_EQ(early_gathers > 0, !align);
  }
}

TEST_F(PendingGather, TheHookCanBeTurnedOffAndOn) {
  run_ranks(2, [](const ParallelState& state) {
    SmallNet net(kLayers);
    DistributedDataParallel ddp(net, state, Setting{.overlap_gather = true}.ddp());
    ddp.start_param_sync();  // nothing has changed
    EXPECT_FALSE(ddp.param_sync_pending());
    ddp.start_param_sync(false, /*force_dispatch=*/true);
    EXPECT_TRUE(ddp.param_sync_pending());
    ddp.disable_forward_pre_hook();
    EXPECT_FALSE(ddp.param_sync_pending());
    ddp.start_param_sync(false, true);
    EXPECT_FALSE(ddp.param_sync_pending());
    ddp.enable_forward_pre_hook();
    ddp.start_param_sync(/*force_sync=*/true, true);
    EXPECT_FALSE(ddp.param_sync_pending());
    ddp.start_param_sync(false, true);
    EXPECT_TRUE(ddp.param_sync_pending());
  });
  SmallNet net;
  DistributedDataParallel plain(net, ParallelState::single_process());
  EXPECT_NO_THROW(plain.start_param_sync());
  EXPECT_THROW(plain.enable_forward_pre_hook(), UsageError);
}

}  // namespace
}  // namespace lockstep
