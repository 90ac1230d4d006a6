#include "lockstep/parallel_state/self_test.h"

#include <array>
#include <cstdlib>
#include <thread>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {
namespace {

constexpr int64_t kRanks = 2, kElements = 1 << 16;

void reduce_as(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank) {
  ParallelStateOptions options;
  options.sizes.world_size = kRanks;
  options.timeout = std::chrono::seconds(10);
  options.single_host = false;
  const ParallelState state(store, rank, options);
  const at::Tensor tensor = at::full({kElements}, static_cast<double>(rank + 1), at::kFloat);
  all_reduce(state.world(), tensor, ReduceOp::sum, "self-test").wait();
  const double sum = tensor.sum(at::kDouble).item<double>();
  require<CommunicationError>(sum == 3.0 * kElements, "the ranks' sum is {}, expected {}", sum,
                              3.0 * kElements);
  barrier(state.world(), "self-test");
}

}  // namespace

std::string two_rank_self_test() {
  prepare_rank_threads();
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::array<std::string, kRanks> errors;
  std::array<std::thread, kRanks> threads;
  for (int64_t rank = 0; rank < kRanks; ++rank)
    threads[static_cast<size_t>(rank)] = std::thread([&store, &errors, rank] {
      try {
        reduce_as(store, rank);
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(rank)] = fmt::format("rank {}: {}", rank, error.what());
      }
    });
  for (std::thread& thread : threads) thread.join();
  return errors[0].empty() ? errors[1] : errors[0];
}

void prepare_rank_threads() { ::setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0); }

}  // namespace lockstep
