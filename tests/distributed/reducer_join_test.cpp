// Uneven inputs and statistics. RN: see reducer_buckets_test.cpp.

#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/power_sgd_hook.h"
#include "lockstep/tests/distributed/reducer_nets.h"
#include "lockstep/tests/support/open_ranks.h"
#include "lockstep/tests/support/small_net.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::all_equal_to;
using testing::errors_of_ranks;
using testing::linear_loss;
using testing::named_zeros;
using testing::reduce;
using testing::replicas;
using testing::run_ranks;
using testing::throws_with;

TEST(ReducerJoin, R51GradientsAreDividedByAllOrByActiveRanks) {
  for (const bool by_all : {true, false})
    run_ranks(2, [&](const ParallelState& state) {
      const auto params = named_zeros({25});
      Reducer reducer(params, replicas(state));
      std::vector<double> gradients;
      reducer.join(
          [&] {
            for (int i = 0; i < 3 + 2 * state.rank(); ++i) {
              reducer.zero_grad_buffer();
              reduce(reducer, [&] { return linear_loss(params, {0}, 50); });
              gradients.push_back(params[0].tensor.grad()[0].item<double>());
            }
          },
          {.divide_by_initial_world_size = by_all});
      const double late = by_all ? 25 : 50;
      EXPECT_EQ(gradients, state.rank() == 0 ? std::vector<double>({50, 50, 50})
                                             : std::vector<double>({50, 50, 50, late, late}));
      // Afterwards all ranks take part again.
      reducer.zero_grad_buffer();
      reduce(reducer, [&] { return linear_loss(params, {0}, 4 * state.rank()); });
      EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 2));
    });
}

/// Number of iterations for each rank.
using Plan = std::vector<int64_t>;

std::vector<Plan> plans() {
  std::vector<Plan> result = {{3, 3}, {0, 4, 1}, {5, 2, 0, 3}};
  for (const int64_t baseline : {0, 5})
    for (const int64_t offset : {2, 3, 10}) result.push_back({baseline, baseline + offset});
  return result;
}

/// One parameter update: p -= rate * gradient.
void step(const std::vector<NamedParameter>& params, double rate) {
  const at::NoGradGuard no_grad;
  for (const auto& param : params)
    if (param.tensor.grad().defined()) param.tensor.detach().sub_(param.tensor.grad() * rate);
}

TEST(ReducerJoin, R52R54R55EveryIterationOfEveryRankCountsAndAllEndAlike) {
  struct Variant {
    ReducerOptions options;
    bool accumulates;
    bool hooked;
  };
  const Variant variants[] = {
      {{.bucket_bytes_caps = {8}}, false, false},
      {{.bucket_bytes_caps = {8}, .find_unused_parameters = true}, false, false},
      {{.bucket_bytes_caps = {8},
        .find_unused_parameters = true,
        .skip_all_reduce_unused_params = true},
       false,
       false},
      {{.bucket_bytes_caps = {8}, .static_graph = true}, false, false},
      {{.gradient_as_bucket_view = false}, true, false},
      {{}, false, true}};
  for (const Plan& plan : plans())
    for (const Variant& variant : variants)
      run_ranks(static_cast<int64_t>(plan.size()), [&](const ParallelState& state) {
        const auto ranks = static_cast<double>(plan.size());
        const auto params = named_zeros({3, 1, 2});
        Reducer reducer(params, replicas(state), variant.options);
        if (variant.hooked) reducer.register_comm_hook(std::make_shared<AllReduceHook>());
        const auto coefficient = [](int64_t rank, int64_t i) {
          return static_cast<double>(rank * 7 + i * 3 + 1);
        };
        reducer.join([&] {
          for (int64_t i = 0; i < plan[static_cast<size_t>(state.rank())]; ++i) {
            reducer.zero_grad_buffer();
            const double c = coefficient(state.rank(), i) / (variant.accumulates ? 2 : 1);
            if (variant.accumulates) {
              const auto guard = reducer.no_sync();
              reducer.prepare_for_forward();
              linear_loss(params, {0, 1, 2}, c).backward();
            }
            reduce(reducer, [&] { return linear_loss(params, {0, 1, 2}, c); });
            step(params, 0.5 * ranks);
          }
        });
        double sum = 0;
        for (size_t rank = 0; rank < plan.size(); ++rank)
          for (int64_t i = 0; i < plan[rank]; ++i)
            sum += coefficient(static_cast<int64_t>(rank), i);
        for (const auto& param : params)
          EXPECT_TRUE(at::allclose(param.tensor, at::full_like(param.tensor, -0.5 * sum), 1e-5));
      });
}

TEST(ReducerJoin, AStaticGraphIsLearntByARankThatHadNoInputsInTheFirstEpoch) {
  for (const int64_t idle : {0, 1})
    run_ranks(2, [&](const ParallelState& state) {
      const auto params = named_zeros({2, 3, 4});
      Reducer reducer(params, replicas(state), {.bucket_bytes_caps = {1}, .static_graph = true});
      for (int epoch = 0; epoch < 3; ++epoch) {
        const int steps = epoch == 0 && state.rank() == idle ? 0 : 3;
        reducer.join([&] {
          for (int i = 0; i < steps; ++i) {
            reducer.zero_grad_buffer();
            reduce(reducer, [&] { return linear_loss(params, {0, 2}, 2 + 2 * state.rank()); });
            const double mean = epoch > 0 ? 3 : 1 + state.rank();
            EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), mean)) << epoch;
            EXPECT_TRUE(all_equal_to(params[2].tensor.grad(), mean)) << epoch;
            EXPECT_FALSE(params[1].tensor.grad().defined());
          }
        });
      }
    });
}

TEST(ReducerJoin, R53AllRanksThrowWhenTheFirstHasNoInputs) {
  std::vector<int64_t> iterations(3, 0);
  const auto errors = errors_of_ranks(3, [&](const ParallelState& state) {
    const auto params = named_zeros({2});
    Reducer reducer(params, replicas(state));
    const auto run = [&] {
      reducer.join(
          [&] {
            for (int64_t i = 0; i < 2 + state.rank(); ++i) {
              reduce(reducer, [&] { return linear_loss(params, {0}, 1); });
              ++iterations[static_cast<size_t>(state.rank())];
            }
          },
          {.throw_on_early_termination = true});
    };
    EXPECT_THROW(run(), UsageError);
    // The group is still usable: the ranks have agreed.
    reducer.zero_grad_buffer();
    reduce(reducer, [&] { return linear_loss(params, {0}, 3 * state.rank()); });
    EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), 3));
    iterations[static_cast<size_t>(state.rank())] += 10;
    run();
  });
  EXPECT_EQ(iterations, (std::vector<int64_t>{14, 14, 14}));
  EXPECT_EQ(errors[0], "Reducer: join: rank 0 exhausted all its inputs after 2 iterations");
  for (const size_t rank : {1, 2})
    EXPECT_TRUE(errors[rank].starts_with(
        "Reducer: join: detected at least one rank that exhausted its inputs"))
        << errors[rank];
}

TEST(ReducerJoin, AFailingRankEndsTheOthers) {
  const auto errors = errors_of_ranks(2,
                                      [&](const ParallelState& state) {
                                        const auto params = named_zeros({2});
                                        Reducer reducer(params, replicas(state));
                                        reducer.join([&] {
                                          if (state.rank() == 1)
                                            throw std::runtime_error("no data");
                                        });
                                      },
                                      {.timeout = std::chrono::seconds(6)});
  EXPECT_EQ(errors[1], "no data");
  EXPECT_NE(errors[0].find("no data"), std::string::npos) << errors[0];
}

TEST(ReducerJoin, AReductionInsideNoSyncIsRefused) {
  const auto params = named_zeros({2});
  Reducer reducer(params, replicas(ParallelState::single_process()));
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        reducer.join([&] {
          reducer.prepare_for_forward();
          const auto guard = reducer.no_sync();
          linear_loss(params, {0}, 1).backward();
        });
      },
      "'p0' received a gradient inside no_sync()"));
}

/// Two forwards before their backwards, and one whose backward never runs.
TEST(ReducerJoin, AForwardWithoutABackwardBeforeTheNextOneOrTheEndEndsAllRanks) {
  for (const int64_t waiting : {0, 1})  // ranks without inputs
    for (const size_t forwards : {2, 1}) {
      const auto errors = testing::errors_of_open_ranks(2, [&](const ParallelState& state) {
        const auto params = named_zeros({2});
        Reducer reducer(params, replicas(state));
        reducer.join([&] {
          if (state.rank() < waiting) return;
          reduce(reducer, [&] { return linear_loss(params, {0}, 4); });
          EXPECT_TRUE(all_equal_to(params[0].tensor.grad(), waiting == 0 ? 4 : 2));
          std::vector<at::Tensor> losses;
          while (losses.size() < forwards) {
            reducer.prepare_for_forward();
            losses.push_back(linear_loss(params, {0}, 1));
            reducer.prepare_for_backward({losses.back()});
          }
          if (forwards == 1) return;
          for (const at::Tensor& loss : losses) loss.backward();
        });
      });
      testing::expect_all_contain(
          errors,
          " has reduced no backward in iteration 2; inside join() each forward has its backward "
          "before the next one and before the end",
          std::to_string(forwards) + " forwards");
    }
}

TEST(ReducerStatistics, R83TimesAreInOrder) {
  run_ranks(2, [](const ParallelState& state) {
    const auto params = named_zeros({1000, 2000, 3000});
    Reducer reducer(params, replicas(state), {.bucket_bytes_caps = {1}});
    reducer.set_ddp_runtime_logging_sample_rate(5);
    int64_t last = 0;
    for (int step = 1; step <= 15; ++step) {
      reduce(reducer, [&] { return linear_loss(params, {0, 1, 2}, 1); });
      const auto data = reducer.logging_data();
      const auto& n = data.integers;
      EXPECT_GT(n.at("forward_compute_time"), 0);
      EXPECT_LE(n.at("backward_compute_comm_overlap_time"), n.at("backward_compute_time"));
      EXPECT_LE(n.at("backward_compute_comm_overlap_time"), n.at("backward_comm_time"));
      EXPECT_LE(n.at("avg_backward_compute_comm_overlap_time"), n.at("avg_backward_comm_time"));
      EXPECT_LT(n.at("forward_compute_time_start"), n.at("backward_compute_time_start"));
      EXPECT_LT(n.at("backward_compute_time_start"), n.at("backward_compute_time_end"));
      EXPECT_LT(n.at("backward_comm_time_start"), n.at("backward_comm_time_end"));
      EXPECT_LE(n.at("backward_compute_time_end"), n.at("backward_comm_time_end"));
      const bool sampled = step <= 10 || step == 15;
      EXPECT_EQ(n.at("forward_compute_time_start") != last, sampled) << step;
      last = n.at("forward_compute_time_start");
      ASSERT_EQ(data.buckets.size(), 3u);
      for (size_t b = 0; b < 3; ++b) {
        EXPECT_EQ(data.buckets[b].bytes, 4 * (3000 - 1000 * static_cast<int64_t>(b)));
        EXPECT_LE(data.buckets[b].launched, data.buckets[b].finished);
        EXPECT_GE(data.buckets[b].launched, reducer.get_backward_stats()[2 - b]);
        EXPECT_LE(data.buckets[b].overlap, n.at("backward_compute_time"));
      }
      EXPECT_GT(data.buckets[0].overlap, 0);
    }
  });
  Reducer reducer(named_zeros({1}), replicas(ParallelState::single_process()));
  EXPECT_TRUE(throws_with<ConfigError>([&] { reducer.set_ddp_runtime_logging_sample_rate(0); },
                                       "found 0, allowed: >= 1"));
}

TEST(ReducerStatistics, AFailureIsNoted) {
  const auto params = named_zeros({1, 1});
  Reducer reducer(params, replicas(ParallelState::single_process()));
  reduce(reducer, [&] { return linear_loss(params, {0}, 1); });
  EXPECT_THROW(reducer.finalize_backward(), UsageError);
  EXPECT_EQ(reducer.logging_data().integers.at("has_error"), 1);
  EXPECT_NE(reducer.logging_data().strings.at("error").find("'p1'"), std::string::npos);
  EXPECT_NE(reducer.describe().find("bucket 0 ('p0' to 'p1'): all-reduce sum"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
