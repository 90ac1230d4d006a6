// Settings that must be equal on all ranks of a Reducer: all its options, and those of join().

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/distributed/reducer_nets.h"

namespace lockstep {
namespace {

using testing::errors_of_ranks;
using testing::named_zeros;
using Lines = std::vector<std::string>;

struct OptionCase {
  ReducerOptions common;  ///< of all ranks but the last
  void (*change)(ReducerOptions& of_last);
  std::string option, first, last;  ///< name and values, as in the error
};

std::vector<OptionCase> option_cases() {
  using O = ReducerOptions;
  const O unused = {.find_unused_parameters = true};
  return {
      {{},
       [](O& o) {
         o.bucket_bytes_caps = {1 << 20, 7};
       },
       "bucket_bytes_caps",
       "[1048576, 26214400]",
       "[1048576, 7]"},
      {{},
       [](O& o) { o.initial_bucket_bytes_caps = {64}; },
       "initial_bucket_bytes_caps",
       "[]",
       "[64]"},
      {{.bucket_indices = {{1}, {0}}},
       [](O& o) {
         o.bucket_indices = {{0}, {1}};
       },
       "bucket_indices",
       "[[1], [0]]",
       "[[0], [1]]"},
      {{}, [](O& o) { o.rebuild_buckets = false; }, "rebuild_buckets", "true", "false"},
      {{},
       [](O& o) { o.find_unused_parameters = true; },
       "find_unused_parameters",
       "false",
       "true"},
      {unused, [](O& o) { o.skip_all_reduce_unused_params = true; },
       "skip_all_reduce_unused_params", "false", "true"},
      {{}, [](O& o) { o.static_graph = true; }, "static_graph", "false", "true"},
      {{},
       [](O& o) { o.gradient_as_bucket_view = false; },
       "gradient_as_bucket_view",
       "true",
       "false"},
      {{}, [](O& o) { o.sparse_parameters = {"p1"}; }, "sparse_parameters", "[]", "[p1]"},
      {{}, [](O& o) { o.reduce_dtype = at::kDouble; }, "reduce_dtype", "none", "Double"},
      {{}, [](O& o) { o.check_for_nan_in_grad = true; }, "check_for_nan_in_grad", "false", "true"},
      {{}, [](O& o) { o.broadcast_parameters = false; }, "broadcast_parameters", "true", "false"},
  };
}

std::string ranks_text(int64_t ranks) { return ranks == 2 ? "[0, 1]" : "[0, 1, 2]"; }

TEST(ReducerOptions, EachOptionThatDiffersIsNamedWithBothValuesAndRanks) {
  for (const int64_t ranks : {2, 3})
    for (const OptionCase& test : option_cases()) {
      const auto errors = errors_of_ranks(ranks, [&](const ParallelState& state) {
        ReducerOptions options = test.common;
        if (state.rank() == ranks - 1) test.change(options);
        Reducer(named_zeros({4, 4}), testing::replicas(state), options);
      });
      EXPECT_EQ(errors,
                Lines(static_cast<size_t>(ranks),
                      "the ranks of group dp-cp " + ranks_text(ranks) +
                          " have different settings: " + test.option + " is " + test.first +
                          " on rank 0 and " + test.last + " on rank " + std::to_string(ranks - 1)));
    }
}

TEST(ReducerOptions, EqualOptionsCostEightBytesARankToCompare) {
  for (const OptionCase& test : option_cases()) {
    testing::CollectiveLog log;
    ReducerOptions options = test.common;
    test.change(options);
    options.broadcast_parameters = false;
    testing::run_ranks(2,
                       [&](const ParallelState& state) {
                         Reducer(named_zeros({4, 4}), testing::replicas(state), options);
                       },
                       {.log = &log});
    for (const int64_t rank : {0, 1}) {
      const auto calls = log.of_rank(rank);
      ASSERT_EQ(calls.size(), 1) << test.option;
      EXPECT_EQ(calls[0].operation, "all_gather") << test.option;
      EXPECT_EQ(calls[0].group, "dp-cp") << test.option;
      EXPECT_EQ(calls[0].bytes, 8) << test.option;
    }
  }
}

TEST(ReducerOptions, OptionsOfJoinThatDifferEndItOnEveryRank) {
  const std::pair<ReducerJoinOptions, std::string> cases[] = {
      {{.divide_by_initial_world_size = false},
       "divide_by_initial_world_size is true on rank 0 and false on rank 2"},
      {{.throw_on_early_termination = true},
       "throw_on_early_termination is false on rank 0 and true on rank 2"}};
  for (const auto& [of_last, difference] : cases) {
    const auto errors = errors_of_ranks(
        3,
        [&, &join_options = of_last](const ParallelState& state) {
          const auto params = named_zeros({4});
          Reducer reducer(params, testing::replicas(state));
          reducer.join(
              [&] {
                if (state.rank() == 0) return;
                testing::reduce(reducer, [&] { return testing::linear_loss(params, {0}, 1); });
              },
              state.rank() == 2 ? join_options : ReducerJoinOptions());
        },
        {.timeout = std::chrono::milliseconds(3000)});
    EXPECT_EQ(errors, Lines(3, "the ranks of group dp-cp [0, 1, 2] have different settings: " +
                                   difference));
  }
}

}  // namespace
}  // namespace lockstep
