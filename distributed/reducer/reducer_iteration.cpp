// The life of an iteration: it is prepared, armed by the first gradient, reduced bucket by bucket,
// and closed when backward has ended.

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/parameter_check.h"
#include "lockstep/distributed/reducer_assignment.h"
#include "lockstep/distributed/reducer_impl.h"
#include "lockstep/distributed/shortened.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {

void Reducer::Impl::prepare_for_forward() {
  if (no_sync.inside()) return;
  guarded([&] {
    refuse_open();
    if (joining) refuse_announced();
    refuse_unfrozen(frozen);
  });
  if (joining) meet_waiting_ranks();
  guarded([&] {
    if (!hooks_compared) compare_hooks();
    rebuild_if_due();
    any_armed = false;
    statistics.begin_forward(++iteration);
  });
}

void Reducer::Impl::compare_hooks() {
  hooks_compared = true;
  check_same_text(hook ? hook->identity() : "none", group, "communication hooks");
}

void Reducer::Impl::rebuild_if_due() {
  if (rebuilt || reductions == 0 || !options.rebuild_buckets || finds_unused()) return;
  rebuilt = true;
  for (const auto& bucket : buckets) initial_bytes.push_back(bucket->bytes());
  std::vector<bool> listed(params.size(), false);
  std::vector<int64_t> order;
  const auto add = [&](size_t p) {
    if (listed[p]) return;
    listed[p] = true;
    order.push_back(static_cast<int64_t>(p));
  };
  // From the back: a parameter with several gradients is ready after its last one.
  for (size_t i = ready_order.size(); i-- > 0;) add(static_cast<size_t>(ready_order[i]));
  std::reverse(order.begin(), order.end());
  for (size_t p = params.size(); p-- > 0;) add(p);
  const at::Tensor agreed = at::tensor(order, at::kLong);
  broadcast(group, agreed, 0, "order of gradients").wait();
  std::vector<at::Tensor> tensors;
  std::vector<size_t> positions;
  for (int64_t i = 0; i < agreed.numel(); ++i) {
    positions.push_back(static_cast<size_t>(agreed[i].item<int64_t>()));
    tensors.push_back(params[positions.back()].tensor);
  }
  build_buckets(compute_bucket_assignment_by_size(tensors, options.bucket_bytes_caps, sparse,
                                                  positions, options.reduce_dtype)
                    .buckets);
}

void Reducer::Impl::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  if (no_sync.inside()) return;
  guarded([&] {
    refuse_open();
    ends_later = false;
    running.reset();
    statistics.begin_backward(params.size(), buckets.size());
    const bool reaches = note_prepared(outputs);
    if (options.skip_all_reduce_unused_params) skip_unused_buckets();
    if (!reaches && prepared.size() == 1) {
      running = prepared.back();
      ends_later = true;  // there is no backward that would end it
      end_backward();
      return;
    }
    require<UsageError>(watch(outputs) || reaches,
                        "Reducer: prepare_for_backward: found no output with a graph; at least "
                        "one must have a graph while other prepared backwards are pending ({})",
                        prepared.size() - 1);
  });
}

/// Drops prepared backwards that cannot run any more.
void Reducer::Impl::forget_gone() {
  std::erase_if(prepared, [&](const auto& backward) {
    return backward != running && backward->are_gone();  // a running one destroys its graph
  });
}

/// Adds a backward. Returns whether it may reach a parameter.
bool Reducer::Impl::note_prepared(const std::vector<at::Tensor>& outputs) {
  forget_gone();
  if (finds_unused() && prepared.size() != searched) {  // some were dropped, here or earlier
    usage->forget_search();
    for (const auto& backward : prepared) usage->search(*backward);
  }
  prepared.push_back(std::make_shared<OutputGraphs>(outputs));
  searched = prepared.size();
  return !finds_unused() || usage->search(*prepared.back());
}

/// Makes the backward that was prepared last report when it reaches one of its outputs. Returns
/// whether it can.
bool Reducer::Impl::watch(const std::vector<at::Tensor>& outputs) {
  bool can_report = false;
  for (const at::Tensor& output : outputs) {
    if (!output.defined() || !output.grad_fn()) continue;
    can_report = true;
    output.register_hook([this, backward = std::weak_ptr<OutputGraphs>(prepared.back()),
                          is_alive = std::weak_ptr<int>(alive)](const at::Tensor&) {
      if (is_alive.lock()) guarded([&] { note_begun(backward.lock()); });
    });
  }
  return can_report;
}

/// `backward` has reached one of its outputs; null: one that is reduced already.
void Reducer::Impl::note_begun(std::shared_ptr<OutputGraphs> backward) {
  // torch::autograd::grad() leaves param.grad() alone.
  const auto* const captured = torch::autograd::get_current_graph_task_exec_info();
  if (no_sync.inside() || (captured && !captured->empty())) return;
  if (!running) running = std::move(backward);
  // Backward may run other backwards inside it; only the outermost one sees the outputs.
  if (finds_unused() || counts_firings()) end_backward_later();
}

void Reducer::Impl::skip_unused_buckets() {
  const std::vector<bool> reached = usage->needed_on_any_rank();
  skipped.assign(buckets.size(), true);
  for (size_t b = 0; b < buckets.size(); ++b)
    for (const size_t p : indices[b])
      if (reached[p]) skipped[b] = false;
}

void Reducer::Impl::on_gradient(int64_t position, bool in_place) {
  if (no_sync.inside()) {
    require<UsageError>(!joining || !joining->announced,
                        "Reducer: '{}' received a gradient inside no_sync(), but "
                        "prepare_for_forward() announced a reduction; inside join() it belongs "
                        "inside no_sync() too",
                        params[static_cast<size_t>(position)].name);
    if (armed) guarded([&] { refuse_late(position); });
    if (usage) guarded([&] { note_without_reduction(static_cast<size_t>(position)); });
    return;
  }
  guarded([&] {
    const auto param = static_cast<size_t>(position);
    if (!armed) arm(position);
    const Place& place = places[param];
    const bool has_gradient = params[param].tensor.grad().defined();
    if (!plain && !completes(param, has_gradient)) return;
    if (sync->is_ready(position)) [[unlikely]]
      fail<UsageError>(
          "Reducer: mark a variable ready only once: parameter {} ('{}') received another "
          "gradient in iteration {}; causes: it is used in several recomputed parts that run a "
          "backward of their own (static_graph = true takes these), or the outputs given to "
          "prepare_for_backward() do not lead to it, or backward ran more than once",
          position, params[param].name, iteration);
    if (has_gradient) [[likely]]
      place.bucket->take(place.index, in_place);
    else
      place.bucket->take_unused(place.index);
    launch(sync->on_gradient(position, /*synchronize=*/true));
  });
}

/// A bucket may be under way that holds what the parameter has received in the open iteration.
void Reducer::Impl::refuse_late(int64_t position) const {
  require<UsageError>(
      !sync->is_ready(position),
      "Reducer: '{}' received a gradient inside no_sync() while iteration {}, which "
      "reduces it, is open; finish the backwards of that iteration first",
      params[static_cast<size_t>(position)].name, iteration);
}

/// An accumulated gradient counts as a use in the reduction that follows.
void Reducer::Impl::note_without_reduction(size_t param) {
  if (!params[param].tensor.grad().defined()) return;
  require<UsageError>(!options.static_graph || counts_uses() || usage->counts()[param] > 0,
                      "Reducer: static_graph: parameter {} ('{}') received a gradient inside "
                      "no_sync(), but no rank used it up to the end of the first iteration",
                      param, params[param].name);
  usage->note(param);
}

/// Opens an iteration; its first gradient is that of `position`.
void Reducer::Impl::arm(int64_t position) {
  require<UsageError>(guard.failure().empty(), "Reducer: an earlier call failed: {}",
                      guard.failure());
  forget_gone();
  require<UsageError>(!prepared.empty(),
                      "Reducer: '{}' received a gradient in a backward that was not prepared; call "
                      "prepare_for_forward() and prepare_for_backward() for each backward that is "
                      "to be reduced, and run the others inside no_sync(){}",
                      params[static_cast<size_t>(position)].name,
                      usage ? "; with find_unused_parameters, and in the first iteration with "
                              "static_graph, an iteration ends with its first backward"
                            : "");
  armed = any_armed = true;
  all_launched = false;
  sync->reset();
  buckets_reduced = 0;
  std::fill(fired.begin(), fired.end(), 0);
  const bool records = reductions == 0 && !rebuilt && options.rebuild_buckets;
  plain = !usage && !statistics.is_sampled() && !records;
  if (finds_unused() || (options.static_graph && !expected.empty())) mark_unused();
}

/// Notes a gradient, which may be undefined. Returns whether it is the last one that `param` gets
/// in this iteration.
bool Reducer::Impl::completes(size_t param, bool has_gradient) {
  if (statistics.is_sampled()) statistics.gradient_ready(param);
  if (usage && has_gradient) usage->note(param);
  if (reductions == 0) ready_order.push_back(static_cast<int64_t>(param));
  if (finds_unused()) end_backward_later();
  if (!options.static_graph) return true;
  ++fired[param];
  if (counts_firings()) {
    end_backward_later();
    return false;
  }
  require<UsageError>(fired[param] <= expected[param],
                      "Reducer: static_graph: the training graph has changed in this iteration: "
                      "parameter {} ('{}') received {} gradients, in the first iteration {}",
                      param, params[param].name, fired[param], expected[param]);
  return fired[param] == expected[param];
}

/// Parameters that will get no gradient are ready now, so that their buckets need not wait for the
/// end.
void Reducer::Impl::mark_unused() {
  for (size_t p = 0; p < params.size(); ++p) {
    if (options.static_graph ? expected[p] > 0 : usage->is_reachable(p)) continue;
    places[p].bucket->take_unused(places[p].index);
    launch(sync->on_gradient(static_cast<int64_t>(p), /*synchronize=*/true));
  }
}

void Reducer::Impl::launch(GradSyncState::Launch which) {
  for (auto i = static_cast<size_t>(which.first); i < static_cast<size_t>(which.last); ++i) {
    if (is_skipped(i)) continue;
    const auto rows = sparse_rows.find(buckets[i]->params().front().name);
    buckets[i]->start(hook.get(), divisor, rows == sparse_rows.end() ? at::Tensor() : rows->second);
    ++buckets_reduced;
    if (statistics.is_sampled()) statistics.launched(i);
  }
  if (which.empty() || which.last < sync->num_buckets()) return;
  all_launched = true;
  if (counts_uses()) usage->start_count();
  if (!ends_later) end_backward_later();
}

/// Makes the running backward call end_backward() when it is done.
void Reducer::Impl::end_backward_later() {
  if (ends_later) return;
  ends_later = true;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [this, is_alive = std::weak_ptr<int>(alive)] {
        if (is_alive.lock()) guarded([&] { end_backward(); });
      });
}

void Reducer::Impl::end_backward() {
  if (!armed && finds_unused() && running) arm(0);  // backward has reached no parameter
  ends_later = false;
  if (!armed) return;
  if (finds_unused() || counts_firings()) complete_missing();
  if (all_launched) finalize();
}

/// Backward has ended: parameters without a gradient get none.
void Reducer::Impl::complete_missing() {
  ends_later = true;
  for (size_t p = 0; p < params.size(); ++p) {
    if (sync->is_ready(static_cast<int64_t>(p))) continue;
    const Place& place = places[p];
    if (usage->is_used_here(p) && params[p].tensor.grad().defined())
      place.bucket->take(place.index, /*in_place=*/false);
    else
      place.bucket->take_unused(place.index);
    launch(sync->on_gradient(static_cast<int64_t>(p), /*synchronize=*/true));
  }
  ends_later = false;
}

/// Waits for everything that was launched.
void Reducer::Impl::finish_reductions() {
  for (size_t i = 0; i < buckets.size(); ++i) {
    if (is_skipped(i)) continue;
    buckets[i]->finish();
    if (statistics.is_sampled()) statistics.finished(i);
  }
  if (usage) usage->finish_count();
  sync->finished();
  sparse_rows.clear();
  skipped.clear();
  ++reductions;
  armed = false;
  // If none has reported, it is not known which backward this was.
  const auto ended =
      running ? std::find(prepared.begin(), prepared.end(), running) : prepared.begin();
  if (ended != prepared.end()) prepared.erase(ended);
  running.reset();
  if (joining) joining->announced = false;
}

void Reducer::Impl::finalize() {
  if (statistics.is_sampled()) statistics.end_compute();
  finish_reductions();
  if (statistics.is_sampled()) statistics.end_iteration();
  if (!usage) {
    for (const auto& bucket : buckets) bucket->give_all();
    return;
  }
  std::vector<bool> unused(params.size());
  for (size_t p = 0; p < params.size(); ++p) unused[p] = !usage->is_used_here(p);
  for (size_t p = 0; p < params.size(); ++p)
    places[p].bucket->give(places[p].index, !unused[p] || usage->counts()[p] > 0);
  if (!last_unused.empty() && unused != last_unused) unused_changed = true;
  last_unused = std::move(unused);
  usage->clear();
  if (counts_firings()) expected = fired;
}

std::string Reducer::Impl::missing_text() const {
  std::vector<std::string> missing;
  for (size_t p = 0; p < params.size(); ++p)
    if (!sync->is_ready(static_cast<int64_t>(p)))
      missing.push_back(fmt::format("{} ('{}')", p, params[p].name));
  return fmt::format("{} of {} parameters received no gradient: {}", missing.size(), params.size(),
                     shortened(missing));
}

void Reducer::Impl::refuse_open() const {
  require<UsageError>(guard.failure().empty(), "Reducer: an earlier call failed: {}",
                      guard.failure());
  if (!armed) return;
  const char* const advice =
      options.static_graph ? "the graph has changed, which static_graph does not allow"
      : options.find_unused_parameters
          ? "a backward was interrupted"
          : "make sure that the loss depends on all outputs, or set find_unused_parameters";
  fail<UsageError>("Reducer: the reduction of the prior iteration ({}) has not finished: {}; {}",
                   iteration, missing_text(), advice);
}

/// If several backwards are prepared, some may still be to come.
void Reducer::Impl::refuse_without_gradients() {
  if (no_sync.inside()) return;
  forget_gone();
  if (std::exchange(any_armed, false) || prepared.empty()) return;
  sync->reset();
  fail<UsageError>(
      "Reducer: no backward that was prepared has reached a parameter in iteration {}: {}; make "
      "sure that the loss depends on them, or set find_unused_parameters",
      iteration, missing_text());
}

}  // namespace lockstep
