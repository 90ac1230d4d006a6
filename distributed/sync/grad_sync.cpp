#include "lockstep/distributed/grad_sync.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/graph_task.h>

#include "lockstep/core/check.h"
#include "lockstep/core/gradient_capture.h"
#include "lockstep/distributed/owned_grads.h"
#include "lockstep/distributed/parameter_check.h"

namespace lockstep {

GradSync::GradSync(Bucketing bucketing, const ProcessGroup& job, bool overlap, bool allow_unused,
                   GradSyncCalls calls)
    : bucketing_(std::move(bucketing)),
      guard_(job),
      state_(bucketing_.params, static_cast<int64_t>(bucketing_.groups.size()), overlap,
             allow_unused, calls),
      allows_unused_(allow_unused) {
  GradientObserver& observer = *this;
  for (const Bucketing::Place& place : bucketing_.places)
    hooks_.emplace_back(place.buffer->params()[place.index].tensor,
                        place.buffer->grad_view(place.index), observer,
                        static_cast<int64_t>(hooks_.size()));
}

void GradSync::on_gradient(int64_t position, bool in_place) {
  guarded([&] {
    // This comes first: once a bucket is under way, a late gradient must not be touched.
    const bool synchronizes = !no_sync_.inside();
    const auto ready = state_.on_gradient(position, synchronizes, /*hold_back=*/allows_unused_);
    if (allows_unused_ && synchronizes) note_pass();
    if (!in_place) [[unlikely]] {
      const Bucketing::Place& place = bucketing_.places[static_cast<size_t>(position)];
      place.buffer->adopt_grad(place.index);
    }
    launch(ready);
  });
}

void GradSync::note_pass() {
  const auto outer = CapturesAccumulate::outer();
  if (outer && outer->pass >= 0)
    state_.note_outer_pass(outer->pass);
  else
    state_.note_pass(torch::autograd::get_current_graph_task_id());
}

void GradSync::note_backward() {
  for (size_t position = 0; position < hooks_.size(); ++position)
    on_gradient(static_cast<int64_t>(position), /*in_place=*/true);
}

std::string GradSync::unfinished() const {
  using Phase = GradSyncState::Phase;
  const Phase phase = state_.phase();
  if (phase == Phase::accumulating || phase == Phase::reducing)
    return fmt::format("is not reduced yet ({} is in state {}); call {} first", front(),
                       state_.phase_text(), state_.calls().complete);
  for (const auto& buffer : bucketing_.buffers) {
    int64_t whole = 0;
    for (const ElementRange& range : buffer->reduced()) whole += range.numel();
    if (phase == Phase::ready && whole < buffer->grad_data().numel())
      return fmt::format(
          "is sharded by {} (ddp.use_distributed_optimizer), so that no rank has "
          "all of it; call clip_grad_norm_({{&ddp}}, ...) or let Optimizer clip, or "
          "set_force_all_reduce(true) before the step",
          front());
  }
  return "";
}

std::string GradSync::not_final() const {
  if (left_undone() == nullptr || state_.phase() != GradSyncState::Phase::ready) return "";
  return fmt::format("is not final ({} is in state {}, {}); call finalize_model_grads() first",
                     front(), state_.phase_text(), left_undone());
}

void GradSync::launch(GradSyncState::Launch groups) {
  for (int64_t i = groups.first; i < groups.last; ++i) {
    bucketing_.groups[static_cast<size_t>(i)].start();
    free_all_but(i);
  }
}

void GradSync::free_all_but(int64_t last) {
  if (!bucketing_.lends_grads()) return;
  for (; freed_ < last; ++freed_) bucketing_.groups[static_cast<size_t>(freed_)].finish();
}

void GradSync::refuse_offloaded(const char* call) const {
  for (const auto& buffer : bucketing_.buffers)
    require<UsageError>(!buffer->grads_offloaded(),
                        "{}: the gradients are off-loaded; call restore_grad_buffers() first",
                        call);
}

void GradSync::start() {
  guarded([&] {
    refuse_offloaded(state_.calls().start);
    launch(state_.start());
  });
}

void GradSync::finish() {
  guarded([&] {
    refuse_offloaded(state_.calls().finish);
    for (const auto& buffer : bucketing_.buffers) refuse_frozen(*buffer);
    const auto rest = state_.finish();
    if (bucketing_.lends_grads()) refuse_replaced();  // before they are freed
    launch(rest);
    finish_launched();
    state_.finished();
    refuse_replaced();
  });
}

void GradSync::refuse_replaced() {
  for (const auto& buffer : bucketing_.buffers) buffer->check_grads_attached(state_.calls().reset);
}

void GradSync::finish_launched() {
  for (BucketGroup& group : bucketing_.groups) group.continue_over_instances();
  for (BucketGroup& group : bucketing_.groups) group.finish();
}

void GradSync::abandon() {
  guarded([&] {
    refuse_offloaded(state_.calls().abandon);
    if (state_.phase() == GradSyncState::Phase::ready) return;
    const auto rest = state_.abandon();
    for (int64_t i = rest.first; i < rest.last; ++i) {
      bucketing_.groups[static_cast<size_t>(i)].start_with_nan();
      free_all_but(i);
    }
    finish_launched();
  });
  zero_grad();
}

void GradSync::zero_grad() {
  refuse_offloaded(state_.calls().reset);
  state_.reset();
  freed_ = 0;
  noted_final_ = false;
  note_forced();
  for (const auto& buffer : bucketing_.buffers) buffer->zero_grad();
}

void GradSync::settle() {
  for (BucketGroup& group : bucketing_.groups) group.finish();
}

void GradSync::scale(double factor) {
  const bool reduced = state_.phase() == GradSyncState::Phase::ready;
  require<UsageError>(reduced || !bucketing_.lends_grads(),
                      "scale_gradients: the state is {}; sharded gradients "
                      "(ddp.data_parallel_sharding_strategy = optim_grads or optim_grads_params) "
                      "can be scaled only after finish_grad_sync()",
                      state_.phase_text());
  guarded([&] {
    if (reduced) return refuse_replaced();
    for (const Bucketing::Place& place : bucketing_.places) place.buffer->adopt_grad(place.index);
  });
  for (const auto& buffer : bucketing_.buffers) {
    const std::vector<at::Tensor> all =
        reduced ? reduced_grads(*buffer) : std::vector{buffer->grad_data()};
    for (const at::Tensor& grads : all) at::Tensor(grads).mul_(factor);
  }
}

void GradSync::set_force_all_reduce(bool on) {
  forced_ = on;
  if (state_.phase() == GradSyncState::Phase::idle) note_forced();
}

void GradSync::note_forced() {
  if (!forced_) return;
  for (BucketGroup& group : bucketing_.groups) group.set_force_all_reduce(*forced_);
  for (const auto& buffer : bucketing_.buffers) buffer->note_all_reduced(*forced_);
  forced_.reset();
}

std::vector<BucketReduction> GradSync::reductions() const {
  std::vector<BucketReduction> reductions;
  for (const BucketGroup& group : bucketing_.groups)
    for (const Bucket& bucket : group.buckets()) reductions.push_back(reduction_of(group, bucket));
  return reductions;
}

std::vector<BucketInfo> GradSync::buckets() const {
  std::vector<BucketInfo> infos;
  for (const BucketGroup& group : bucketing_.groups)
    for (const Bucket& bucket : group.buckets()) infos.push_back(info_of(group, bucket));
  return infos;
}

}  // namespace lockstep
