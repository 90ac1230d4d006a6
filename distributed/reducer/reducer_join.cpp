// Uneven inputs: ranks that have finished take part in the reductions of the others.

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/parameter_check.h"
#include "lockstep/distributed/reducer_impl.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

std::vector<ConfigValue> settings_of(const ReducerJoinOptions& options) {
  const auto& [divides_by_all, throws_early] = options;
  return {{"divide_by_initial_world_size", fmt::format("{}", divides_by_all)},
          {"throw_on_early_termination", fmt::format("{}", throws_early)}};
}

}  // namespace

/// The number of ranks that have another iteration. All ranks call it.
int64_t Reducer::Impl::count_active(bool active) {
  const at::Tensor count = at::full({1}, active ? 1 : 0, at::kLong);
  all_reduce(group, count, ReduceOp::sum, "ranks with inputs").wait();
  const auto ranks = count.item<int64_t>();
  divisor =
      joining->options.divide_by_initial_world_size ? group.size() : std::max<int64_t>(ranks, 1);
  return ranks;
}

/// The ranks that wait take part in one reduction for each forward that was announced to them.
void Reducer::Impl::refuse_announced() const {
  require<UsageError>(!joining->announced,
                      "Reducer: join: rank {} has reduced no backward in iteration {}; inside "
                      "join() each forward has its backward before the next one and before the end",
                      group.rank(), iteration);
}

void Reducer::Impl::meet_waiting_ranks() {
  if (count_active(true) < group.size() && joining->options.throw_on_early_termination) {
    joining->ended_early = true;
    fail<UsageError>(
        "Reducer: join: detected at least one rank that exhausted its inputs; rank {} "
        "has made {} iterations",
        group.rank(), joining->iterations);
  }
  ++joining->iterations;
  joining->announced = true;
}

/// Contributes zeros to an iteration of the other ranks.
void Reducer::Impl::shadow_iteration() {
  if (!hooks_compared) compare_hooks();
  rebuild_if_due();
  statistics.skip_iteration();
  if (usage) usage->clear();
  if (options.skip_all_reduce_unused_params) {
    usage->forget_search();
    skip_unused_buckets();
  }
  armed = true;
  all_launched = false;
  ends_later = true;  // there is no backward
  sync->reset();
  for (const auto& bucket : buckets) bucket->take_zeros();
  launch(sync->finish());
  finish_reductions();
  ends_later = false;
  prepared.clear();
}

/// Returns the position of the rank whose parameters are the final ones.
int64_t Reducer::Impl::join(const std::function<void()>& iterations) {
  struct Leave {
    Impl& impl;
    ~Leave() {
      impl.joining.reset();
      impl.divisor = impl.group.size();
    }
  } leave{*this};
  guarded([&] { check_same_parameters({}, group, settings_of(joining->options)); });
  try {
    iterations();
    guarded([&] {
      refuse_open();
      refuse_announced();
    });
    while (count_active(false) > 0) {
      if (joining->options.throw_on_early_termination) {
        joining->ended_early = true;
        fail<UsageError>("Reducer: join: rank {} exhausted all its inputs after {} iterations",
                         group.rank(), joining->iterations);
      }
      guarded([&] { shadow_iteration(); });
    }
  } catch (...) {
    if (!joining->ended_early) group.post_failure(text_of_exception());
    throw;
  }
  const at::Tensor last =
      at::full({1}, joining->iterations * group.size() + group.rank(), at::kLong);
  all_reduce(group, last, ReduceOp::max, "last rank with inputs").wait();
  return last.item<int64_t>() % group.size();
}

}  // namespace lockstep
