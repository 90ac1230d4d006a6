#include "lockstep/parallel_state/self_test.h"

#include <array>
#include <cstdlib>
#include <exception>
#include <thread>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {
namespace {

constexpr int64_t kRanks = 2, kElements = 1 << 16;

struct RankError {
  int64_t rank = 0;
  std::exception_ptr error = {};
};

/// The error of the first rank that has one.
RankError error_of(const ParallelStateOptions& options, const TwoRankBody& body) {
  prepare_rank_threads();
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::array<std::exception_ptr, kRanks> errors;
  std::array<std::thread, kRanks> threads;
  for (int64_t rank = 0; rank < kRanks; ++rank)
    threads[static_cast<size_t>(rank)] = std::thread([&, rank] {
      try {
        body(ParallelState(store, rank, options));
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  return errors[0] ? RankError{0, errors[0]} : RankError{1, errors[1]};
}

ParallelStateOptions two_ranks(bool single_host) {
  ParallelStateOptions options;
  options.sizes.world_size = kRanks;
  options.single_host = single_host;
  return options;
}

void reduce_as(const ParallelState& state) {
  const auto value = static_cast<double>(state.rank() + 1);
  const at::Tensor tensor = at::full({kElements}, value, at::kFloat);
  all_reduce(state.world(), tensor, ReduceOp::sum, "self-test").wait();
  const double sum = tensor.sum(at::kDouble).item<double>();
  require<CommunicationError>(sum == 3.0 * kElements, "the ranks' sum is {}, expected {}", sum,
                              3.0 * kElements);
  barrier(state.world(), "self-test");
}

}  // namespace

std::string two_rank_self_test() {
  ParallelStateOptions options = two_ranks(/*single_host=*/false);
  options.timeout = std::chrono::seconds(10);
  const RankError found = error_of(options, &reduce_as);
  try {
    if (found.error) std::rethrow_exception(found.error);
  } catch (const std::exception& error) {
    return fmt::format("rank {}: {}", found.rank, error.what());
  }
  return "";
}

void run_two_ranks(const TwoRankBody& body) {
  const RankError found = error_of(two_ranks(/*single_host=*/true), body);
  if (found.error) std::rethrow_exception(found.error);
}

void prepare_rank_threads() { ::setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0); }

}  // namespace lockstep
