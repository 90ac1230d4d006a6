// Linear layers whose forward sends in parts, on the asynchronous device over a backend with NCCL's
// rules: a rank's products run on its device before the other ranks have arrived.

#include <gtest/gtest.h>

#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include "lockstep/models/linear.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/device/device_ranks.h"
#include "lockstep/tests/support/device/device_streams.h"

namespace lockstep::testing {
namespace {

using namespace std::chrono_literals;

/// While it lives, records an event after each product that this thread launches.
class ProductEvents {
 public:
  ProductEvents() {
    events.clear();
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(
            [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> {
              return nullptr;
            },
            [](const at::RecordFunction& call, at::ObserverContext*) {
              const std::string_view name = call.name();
              if (name == "aten::mm" || name == "aten::bmm")
                events.push_back(DeviceEvent::record(current_stream(current_device())));
            })
            .scopes({at::RecordScope::FUNCTION}));
  }
  ~ProductEvents() { at::removeCallback(handle_); }
  ProductEvents(const ProductEvents&) = delete;
  ProductEvents& operator=(const ProductEvents&) = delete;

  /// Waits for event `index` of those recorded so far. Returns false after ten seconds.
  static bool reached(size_t index) {
    const auto last = std::chrono::steady_clock::now() + 10s;
    while (!events.at(index).reached()) {
      if (std::chrono::steady_clock::now() > last) return false;
      std::this_thread::sleep_for(1ms);
    }
    return true;
  }
  static size_t count() { return events.size(); }

 private:
  static thread_local std::vector<DeviceEvent> events;
  at::CallbackHandle handle_;
};
thread_local std::vector<DeviceEvent> ProductEvents::events;

struct Found {
  NcclCounts counts;                ///< of rank 0, in the layer
  std::vector<at::Tensor> results;  ///< of the ranks
};

/// Runs forward() of a layer on two ranks. Rank 1 starts after `products` of rank 0 are computed,
/// or throws the error of rank 0.
template <class Forward>
Found run_with_a_late_rank(size_t products, Forward forward) {
  use_lagging_device();
  DeviceRankOptions options;
  options.sizes.tensor = 2;
  options.rules = std::make_shared<NcclRules>();
  std::promise<void> computed;
  const std::shared_future<void> rank_0_has_computed = computed.get_future().share();
  Found found;
  found.results.resize(2);
  run_device_ranks(
      2,
      [&](const ParallelState& state) {
        const bool first = state.rank() == 0;
        at::Tensor y;
        try {
          const ProcessGroup tp = state.group(GroupKind::tp);
          all_reduce(tp, at::ones({1}, state.device()), ReduceOp::sum, "connected").wait();
          if (!first) rank_0_has_computed.get();
          std::optional<ProductEvents> events;
          if (first) events.emplace();
          y = forward(state);
          if (first) {
            EXPECT_GE(ProductEvents::count(), products);
            EXPECT_TRUE(ProductEvents::reached(products - 1)) << "it waits for rank 1";
          }
        } catch (...) {
          if (first) computed.set_exception(std::current_exception());
          throw;
        }
        if (first) computed.set_value();
        found.results[static_cast<size_t>(state.rank())] = y.detach().cpu();
      },
      options);
  found.counts = options.rules->counts(0);
  return found;
}

at::Tensor input(at::IntArrayRef shape) {
  return at::sin(at::arange(c10::multiply_integers(shape), at::kFloat) * 0.3).view(shape);
}

TEST(DeviceOverlap, TheOwnChunkIsMultipliedBeforeThatOfALateRankHasCome) {
  const at::Tensor x = input({16, 1, 8}), w = input({2, 12, 8});
  const Found found = run_with_a_late_rank(1, [&](const ParallelState& state) {
    const auto rank = static_cast<size_t>(state.rank());
    return parallel_linear(x.chunk(2, 0)[rank].to(state.device()),
                           w[state.rank()].to(state.device()), {},
                           {.group = state.group(GroupKind::tp),
                            .input = LinearInput::sequence_chunk,
                            .overlap = true,
                            .label = "up"});
  });
  for (const int64_t rank : {0, 1})
    EXPECT_TRUE(at::allclose(found.results[static_cast<size_t>(rank)], at::linear(x, w[rank])));
  EXPECT_EQ(found.counts.calls.at("tp[0, 1]").at("allgather"), (NcclCalls{2, 8 * 8 * 4}));
}

TEST(DeviceOverlap, NoPartOfAProductWaitsForTheSumOfAnotherOne) {
  const at::Tensor x = input({16, 1, 12}), w = input({8, 12});
  for (const bool cut : {false, true}) {
    const Found found = run_with_a_late_rank(2, [&](const ParallelState& state) {
      const auto rank = static_cast<size_t>(state.rank());
      return parallel_linear(x.chunk(2, 2)[rank].to(state.device()),
                             w.chunk(2, 1)[rank].to(state.device()), {},
                             {.group = state.group(GroupKind::tp),
                              .output = cut ? LinearOutput::sequence_chunk : LinearOutput::summed,
                              .overlap = true,
                              .label = "down"});
    });
    const at::Tensor whole = at::linear(x, w);
    for (const size_t rank : {0, 1})
      EXPECT_TRUE(
          at::allclose(found.results[rank], cut ? whole.chunk(2, 0)[rank] : whole, 1e-5, 1e-5));
    const auto& calls = found.counts.calls.at("tp[0, 1]");
    if (cut)
      EXPECT_EQ(calls.at("reduce_scatter"), (NcclCalls{2, 16 * 8 * 4}));
    else
      EXPECT_EQ(calls.at("allreduce"), (NcclCalls{3, 4 + 16 * 8 * 4}));  // one connected them
  }
}

}  // namespace
}  // namespace lockstep::testing
