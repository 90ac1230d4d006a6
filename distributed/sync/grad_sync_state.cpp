#include "lockstep/distributed/grad_sync_state.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/distributed/shortened.h"

namespace lockstep {

using Phase = GradSyncState::Phase;

const char* to_string(Phase phase) {
  switch (phase) {
    case Phase::idle:
      return "idle";
    case Phase::accumulating:
      return "accumulating";
    case Phase::reducing:
      return "reducing";
    case Phase::ready:
      return "ready";
  }
  return "";
}

GradSyncState::GradSyncState(std::vector<Param> params, int64_t num_buckets, bool overlap,
                             bool allow_unused, GradSyncCalls calls)
    : params_(std::move(params)),
      overlap_(overlap),
      allow_unused_(allow_unused),
      calls_(calls),
      counts_(params_.size()),
      bucket_sizes_(static_cast<size_t>(num_buckets), 0) {
  for (size_t i = 0; i < params_.size(); ++i) {
    const Param& param = params_[i];
    require<UsageError>(param.bucket >= 0 && param.bucket < num_buckets,
                        "parameter '{}': found bucket {}, allowed: 0 to {}", param.name,
                        param.bucket, num_buckets - 1);
    ++bucket_sizes_[static_cast<size_t>(param.bucket)];
    counts_[i].bucket = param.bucket;
  }
  for (int64_t bucket = 0; bucket < num_buckets; ++bucket)
    require<UsageError>(bucket_sizes_[static_cast<size_t>(bucket)] > 0, "bucket {} is empty",
                        bucket);
  pending_ = bucket_sizes_;
}

std::string GradSyncState::phase_text() const {
  if (phase_ != Phase::accumulating) return to_string(phase_);
  int32_t most = 0;
  for (const Counts& counts : counts_) most = std::max(most, counts.received);
  return microbatches_ == 1 ? fmt::format("accumulating {}", most)
                            : fmt::format("accumulating {}/{}", most, microbatches_);
}

void GradSyncState::set_microbatches(int64_t count) {
  require<UsageError>(count >= 1, "{}: found {}, allowed: >= 1", calls_.count, count);
  require<UsageError>(phase_ == Phase::idle || phase_ == Phase::ready,
                      "{}: the state is {}, allowed: idle, ready", calls_.count, phase_text());
  microbatches_ = count;
}

GradSyncState::Launch GradSyncState::on_gradient(int64_t param, bool synchronize, bool hold_back) {
  const std::string& name = params_[static_cast<size_t>(param)].name;
  require<UsageError>(phase_ != Phase::ready,
                      "gradient sync: '{}' received a gradient, but the gradients of this step are "
                      "reduced already (state ready); call {}() before the backward of the next "
                      "step",
                      name, calls_.reset);
  Counts& counts = counts_[static_cast<size_t>(param)];
  const int64_t bucket = counts.bucket;
  if (counts.synchronized == microbatches_ || bucket < next_) [[unlikely]]
    fail<UsageError>(
        "gradient sync: '{}' received backward {} of {} expected in this step (state {}, bucket "
        "{}); {}, and call {}() between steps",
        name, counts.received + 1, std::max<int64_t>(counts.received, microbatches_), phase_text(),
        bucket, calls_.surplus, calls_.reset);
  if (phase_ == Phase::idle) phase_ = Phase::accumulating;
  ++counts.received;
  if (!synchronize || ++counts.synchronized < microbatches_) return {next_, next_};
  --pending_[static_cast<size_t>(bucket)];
  return overlap_ && !hold_back ? launch_ready() : Launch{next_, next_};
}

void GradSyncState::note_pass(int64_t pass) {
  if (pass < 0) return;
  while (!passes_.empty() && passes_.back() > pass) passes_.pop_back();
  if (passes_.empty() || passes_.back() != pass) passes_.push_back(pass);
}

void GradSyncState::note_outer_pass(int64_t pass) {
  const auto place = std::lower_bound(passes_.begin(), passes_.end(), pass);
  if (place == passes_.end() || *place != pass) passes_.insert(place, pass);
}

GradSyncState::Launch GradSyncState::launch_ready() {
  Launch launch{next_, next_};
  while (launch.last < num_buckets() && pending_[static_cast<size_t>(launch.last)] == 0)
    ++launch.last;
  if (!launch.empty()) phase_ = Phase::reducing;
  next_ = launch.last;
  return launch;
}

GradSyncState::Launch GradSyncState::launch_all() {
  const Launch launch{next_, num_buckets()};
  phase_ = Phase::reducing;
  next_ = num_buckets();
  return launch;
}

std::vector<std::string> GradSyncState::list_missing(bool needs_ready) const {
  std::vector<std::string> names;
  for (size_t i = 0; i < params_.size(); ++i) {
    const bool launched = params_[i].bucket < next_;
    const bool there = needs_ready ? is_ready(static_cast<int64_t>(i)) : counts_[i].received > 0;
    if (launched || there) continue;
    names.push_back(fmt::format("'{}' ({}/{})", params_[i].name,
                                needs_ready ? counts_[i].synchronized : counts_[i].received,
                                microbatches_));
  }
  return names;
}

void GradSyncState::refuse_missing(bool needs_ready) const {
  const std::vector<std::string> missing = list_missing(needs_ready);
  if (missing.empty()) return;
  const char* const where = !needs_ready         ? " in any micro-batch"
                            : microbatches_ == 1 ? " in the last micro-batch"
                                                 : " in one micro-batch or more";
  fail<UsageError>(
      "gradient sync: {} of {} parameters received no gradient{} (state {}): {}; check that the "
      "loss depends on them, or set {}",
      missing.size(), params_.size(), where, phase_text(), shortened(missing), calls_.allow_unused);
}

void GradSyncState::refuse_early_finish() const {
  const bool begun = phase_ == Phase::accumulating;
  if (phase_ == Phase::reducing || phase_ == Phase::ready || pending_ != bucket_sizes_ ||
      (allow_unused_ && (!begun || has_all_passes())))
    return;
  fail<UsageError>("{}: came before the last of {} backwards of this step (state {}): {}{}",
                   calls_.finish, microbatches_, phase_text(),
                   shortened(list_missing(/*needs_ready=*/true)),
                   allow_unused_ ? calls_.reached_none : "");
}

GradSyncState::Launch GradSyncState::start() {
  require<UsageError>(phase_ != Phase::ready,
                      "{}: the state is ready, allowed: accumulating, reducing", calls_.start);
  if (!allow_unused_) refuse_missing(/*needs_ready=*/phase_ == Phase::reducing);
  return launch_all();
}

GradSyncState::Launch GradSyncState::finish() {
  require<UsageError>(phase_ != Phase::ready,
                      "{}: the state is ready, allowed: accumulating, reducing; the gradients of "
                      "this step are reduced already",
                      calls_.finish);
  if (allow_unused_)
    refuse_early_finish();
  else
    refuse_missing(/*needs_ready=*/true);
  return launch_all();
}

void GradSyncState::finished() {
  require<UsageError>(phase_ == Phase::reducing && next_ == num_buckets(),
                      "the state is {}, and {} of {} buckets were launched", phase_text(), next_,
                      num_buckets());
  phase_ = Phase::ready;
}

GradSyncState::Launch GradSyncState::abandon() {
  const Launch launch = launch_all();
  phase_ = Phase::ready;
  return launch;
}

bool GradSyncState::is_left_unreduced() const {
  if (phase_ != Phase::accumulating) return false;
  const bool all_ready =
      std::all_of(pending_.begin(), pending_.end(), [](int64_t params) { return params == 0; });
  return all_ready || (allow_unused_ && has_all_passes());
}

void GradSyncState::reset() {
  require<UsageError>(phase_ != Phase::reducing && !is_left_unreduced(),
                      "{}: the state is {}; call {}() first, or {}() after an exception",
                      calls_.reset, phase_text(), calls_.finish, calls_.abandon);
  phase_ = Phase::idle;
  for (Counts& counts : counts_) counts.received = counts.synchronized = 0;
  pending_ = bucket_sizes_;
  next_ = 0;
  passes_.clear();
}

}  // namespace lockstep
