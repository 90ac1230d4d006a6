#include "lockstep/testing/rank_threads.h"

#include <exception>
#include <mutex>
#include <optional>
#include <thread>

#include <ATen/Parallel.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/core/exception_text.h"
#include "lockstep/parallel_state/backends.h"
#include "lockstep/testing/recording_backend.h"

namespace lockstep::testing {
namespace {

struct Outcome {
  std::vector<std::string> messages;
  std::exception_ptr first;
};

Outcome run(int64_t world, const RankBody& body, RankThreadOptions options) {
  prepare_rank_threads();
  options.sizes.world_size = world;
  auto store = c10::make_intrusive<c10d::HashStore>();
  Outcome outcome;
  outcome.messages.resize(static_cast<size_t>(world));
  std::mutex mutex;

  const auto rank_main = [&](int64_t rank) {
    at::set_num_threads(1);
    ParallelStateOptions state_options;
    state_options.sizes = options.sizes;
    state_options.timeout = options.timeout;
    if (options.log || options.observer)
      state_options.observer = [&options](const CollectiveRecord& call) {
        if (options.log) options.log->add(call);
        if (options.observer) options.observer(call);
      };
    if (options.backend_log)
      state_options.backend_factory = [&options, rank](const BackendSpec& spec) {
        return make_recording_backend(make_gloo_backend(spec), options.backend_log, spec.group_name,
                                      rank);
      };
    std::optional<ParallelState> state;
    try {
      if (options.adjust) options.adjust(rank, state_options);
      state.emplace(store, rank, state_options);
      body(*state);
    } catch (...) {
      const std::string message = text_of_exception();
      {
        const std::lock_guard<std::mutex> lock(mutex);
        outcome.messages[static_cast<size_t>(rank)] = message;
        if (!outcome.first) outcome.first = std::current_exception();
      }
      if (state) state->post_failure(message);
    }
  };

  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < world; ++rank) threads.emplace_back(rank_main, rank);
  for (std::thread& thread : threads) thread.join();
  return outcome;
}

}  // namespace

void run_ranks(int64_t world, const RankBody& body, RankThreadOptions options) {
  const Outcome outcome = run(world, body, std::move(options));
  if (outcome.first) std::rethrow_exception(outcome.first);
}

std::vector<std::string> errors_of_ranks(int64_t world, const RankBody& body,
                                         RankThreadOptions options) {
  return run(world, body, std::move(options)).messages;
}

}  // namespace lockstep::testing
