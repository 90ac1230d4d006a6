// The part of ParamSync that gathers and frees units.

#include <cmath>
#include <utility>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/lent_storage.h"
#include "lockstep/distributed/notify_on_error.h"
#include "lockstep/distributed/param_sync.h"

namespace lockstep {

void ParamSync::watch_this_thread() {
  if (!watch_.is_on_this_thread()) watch_.start(*this);
}

void ParamSync::map_unit(size_t index) {
  const LentStorage& lent = gathers_[index].lender->lent_params();
  std::erase_if(units_, [&](const auto& item) { return item.second == index; });
  units_[lent.storage()] = units_[lent.closed()] = index;
}

void ParamSync::begin_step() {
  if (!has_units()) return;
  const Busy busy(busy_);
  for (size_t i = 0; i < gathers_.size(); ++i)
    if (gathers_[i].held) free(i);
  forget_uses();
  order_.begin_step();
  watch_this_thread();
}

void ParamSync::forget_uses() {
  current_.reset();
  switched_ = false;
}

void ParamSync::unshard() {
  const Busy busy(busy_);
  for (Gather& unit : gathers_)
    if (unit.lender && !unit.has_memory()) launch(unit);
  for (Gather& unit : gathers_) {
    if (!unit.lender) continue;
    open(unit);
    unit.held = true;
  }
}

void ParamSync::reshard() {
  const Busy busy(busy_);
  if (!has_units()) return;
  for (size_t i = 0; i < gathers_.size(); ++i) free(i);
  forget_uses();
  watch_this_thread();
}

void ParamSync::launch(Gather& unit) {
  const Busy busy(busy_);  // the collective's own operators use the unit, too
  const at::NoGradGuard no_grad;
  if (!unit.failure.empty()) fail<CommunicationError>("{}", unit.failure);
  notify_on_error(unit.group, [&] {
    unit.lender->lent_params().allocate();
    unit.work = all_gather(unit.group, unit.whole, unit.shard, unit.label);
  });
  unit.launched = true;
}

void ParamSync::open(Gather& unit) {
  if (unit.open) return;
  try {
    if (!unit.launched) launch(unit);
    unit.work.wait();
  } catch (const std::exception&) {
    note_failure(unit);
    throw;
  }
  unit.launched = false;
  unit.lender->lent_params().open();
  unit.open = true;
  unit.version = version_of(unit.tensors);
}

/// Call this where the exception is handled. Views that autograd has saved get memory, because a
/// message cannot stop their readers; the next collective of this rank throws.
void ParamSync::note_failure(Gather& unit) {
  unit.launched = false;
  if (!unit.failure.empty()) return;
  unit.failure = text_of_exception();
  set_message(unit, unit.failure);
  try {
    unit.lender->lent_params().allocate();
    unit.whole.fill_(std::nan(""));
  } catch (const std::exception&) {  // the failure is already noted
  }
}

void ParamSync::keep_changes(Gather& unit) {
  if (!unit.lender || !unit.open) return;
  const uint64_t version = version_of(unit.tensors);
  if (!unit.held && version == unit.version) return;
  unit.lender->keep_param_shard();
  unit.version = version;
}

void ParamSync::free(size_t index, bool keep) {
  Gather& unit = gathers_[index];
  if (!unit.lender || !unit.has_memory()) return;
  if (unit.launched) unit.work.wait();
  if (keep) keep_changes(unit);
  using Others = LentStorage::OtherViews;
  unit.lender->lent_params().close(unit.held ? Others::keep : Others::follow);
  if (unit.held) {
    map_unit(index);
    pool_->trim();  // a step needs less
  }
  unit.open = unit.held = unit.launched = false;
}

bool ParamSync::use_unit(const c10::StorageImpl* storage) {
  const auto found = units_.find(storage);
  if (found == units_.end() || busy_ || phase_ == Phase::stale) return false;
  const Busy busy(busy_);
  const size_t index = found->second;
  Gather& unit = gathers_[index];
  unit.used = operators_;
  try {
    open(unit);
  } catch (const std::exception&) {  // the operator throws it when it reads
  }
  switched_ = switched_ || current_ != index;
  current_ = index;
  return true;
}

void ParamSync::on_operator() noexcept {
  const Busy busy(busy_);
  if (std::exchange(switched_, false)) {
    std::optional<size_t> next = order_.next_after(*current_);
    while (next && !gathers_[*next].lender) next = order_.number_after(*next);
    free_unused(ahead_ ? next : std::nullopt);
  }
  ++operators_;
}

void ParamSync::free_unused(std::optional<size_t> next) {
  const int64_t now = gathers_[*current_].unit;
  for (size_t i = 0; i < gathers_.size(); ++i) {
    Gather& unit = gathers_[i];
    if (i == next || unit.held || unit.unit == now || unit.used == operators_) continue;
    try {
      free(i);
    } catch (const std::exception&) {
      note_failure(unit);
    }
  }
  if (!next || gathers_[*next].has_memory()) return;
  try {
    launch(gathers_[*next]);
  } catch (const std::exception&) {
    note_failure(gathers_[*next]);
  }
}

}  // namespace lockstep
