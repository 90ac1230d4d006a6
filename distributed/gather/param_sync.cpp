#include "lockstep/distributed/param_sync.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/closed_storage.h"
#include "lockstep/distributed/lent_storage.h"
#include "lockstep/parallel_state/axis_groups.h"

namespace lockstep {
namespace {

constexpr const char* kClosed =
    "this parameter is still being all-gathered after the optimizer's step: call "
    "finish_param_sync() of its DistributedDataParallel on every rank first; operators called on "
    "the thread that called step() wait automatically, other reads do not";

constexpr const char* kLost =
    "a parameter is read that its DistributedDataParallel had not gathered when it was destroyed: "
    "call unshard() before, on every rank";

/// The elements of its storage that a tensor spans.
ElementRange span_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  int64_t end = tensor.storage_offset() + 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) end += (tensor.size(d) - 1) * tensor.stride(d);
  return {tensor.storage_offset(), end};
}

}  // namespace

uint64_t ParamSync::version_of(const std::vector<at::Tensor>& tensors) {
  uint64_t version = 0;
  for (const at::Tensor& tensor : tensors) version += static_cast<uint64_t>(tensor._version());
  return version;
}

ParamSync::ParamSync(const Bucketing& bucketing, const ParallelState& state, bool ahead)
    : pool_(bucketing.pool), order_(bucketing.pieces.size()), ahead_(ahead) {
  const auto group_for = [&](const ParamDescription& description) {
    const ReductionKinds kinds = reduction_group(description, state.grids(), /*sharded=*/true);
    return kinds.instances ? state.group(kinds.group) : state.all_gather_group(kinds.group);
  };
  for (auto piece = bucketing.pieces.rbegin(); piece != bucketing.pieces.rend(); ++piece) {
    const ParamAndGradBuffer& buffer = *bucketing.buffers[piece->buffer];
    add_bucket(buffer, piece->bucket, group_for(buffer.params().front().description));
    if (!buffer.lends_params()) continue;
    gathers_.back().lender = bucketing.buffers[piece->buffer].get();
    gathers_.back().unit = bucketing.units[piece->buffer];
    gathers_.back().held = true;
    map_unit(gathers_.size() - 1);
  }
}

ParamSync::~ParamSync() {
  try {
    if (phase_ == Phase::gathering) finish();
    for (Gather& gather : gathers_)
      if (gather.launched) gather.work.wait();
    for (Gather& gather : gathers_)
      if (!gather.open && gather.failure.empty()) set_message(gather, kLost);
  } catch (...) {  // the parameters stay closed
  }
}

void ParamSync::set_message(Gather& gather, const std::string& message) {
  if (gather.lender) return gather.lender->lent_params().set_message(message);
  gather.closed.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      message);
}

void ParamSync::add_bucket(const ParamAndGradBuffer& buffer, size_t bucket,
                           const ProcessGroup& group) {
  const ParamLayout::Bucket& range = buffer.layout().buckets[bucket];
  const ElementRange& own = buffer.owned()[bucket];
  Gather gather{
      .label = fmt::format("parameters '{}' to '{}'",
                           buffer.params()[static_cast<size_t>(range.params.back())].name,
                           buffer.params()[static_cast<size_t>(range.params.front())].name),
      .group = group,
      .whole = buffer.lends_params() ? buffer.param_data()
                                     : buffer.param_data().slice(0, range.start, range.end),
      .shard = buffer.owned_params(own),
      .tensors = {},
      .storage = {},
      .closed = {}};
  if (!buffer.lends_params()) {
    gather.storage = buffer.param_data().storage();
    gather.closed = closed_twin(gather.storage, kClosed);
  }
  for (const int64_t param : range.params) {
    const at::Tensor& tensor = buffer.params()[static_cast<size_t>(param)].tensor;
    if (tensor.numel() > 0) gather.tensors.push_back(tensor);
  }
  gathers_.push_back(std::move(gather));
}

void ParamSync::set_storage(Gather& gather, bool open) {
  const c10::Storage& to = open ? gather.storage : gather.closed;
  const auto* const from = (open ? gather.closed : gather.storage).unsafeGetStorageImpl();
  for (const at::Tensor& tensor : gather.tensors)
    if (tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == from)
      set_storage_of(tensor, to);
  gather.open = open;
}

void ParamSync::mark_stale() {
  require<UsageError>(phase_ != Phase::gathering,
                      "parameters were changed while their all-gather is under way; call "
                      "finish_param_sync() first");
  const Busy busy(busy_);
  started_ = 0;
  phase_ = Phase::stale;
  if (has_units()) {
    order_.end_step();
    for (size_t i = 0; i < gathers_.size(); ++i) free(i, /*keep=*/false);
    return;
  }
  for (Gather& gather : gathers_)
    if (gather.group.size() > 1) set_storage(gather, false);
}

void ParamSync::start_next() {
  const at::NoGradGuard no_grad;
  if (has_units()) {
    const size_t unit = started_++;
    if (ahead_ && unit == order_.first() && gathers_[unit].lender) launch(gathers_[unit]);
    return;
  }
  Gather& gather = gathers_[started_];
  gather.work = all_gather(gather.group, gather.whole, gather.shard, gather.label);
  ++started_;
}

void ParamSync::start(bool watch) {
  if (phase_ != Phase::stale) return;
  const Busy busy(busy_);
  while (started_ < gathers_.size()) start_next();
  if (has_units()) {
    phase_ = Phase::current;
    return;
  }
  phase_ = Phase::gathering;
  settle();
  if (watch && pending()) watch_.start(*this);
}

void ParamSync::finish() {
  start(/*watch=*/false);
  const Busy busy(busy_);
  if (has_units()) {
    for (Gather& gather : gathers_) keep_changes(gather);
    return;
  }
  for (Gather& gather : gathers_) wait(gather);
  settle();
}

void ParamSync::wait(Gather& gather) {
  if (gather.open) return;
  if (!gather.failure.empty()) fail<CommunicationError>("{}", gather.failure);
  try {
    gather.work.wait();
  } catch (const std::exception& error) {
    gather.failure = error.what();
    set_message(gather, gather.failure);
    throw;
  }
  set_storage(gather, true);
}

void ParamSync::settle() {
  if (!std::all_of(gathers_.begin(), gathers_.end(), [](const Gather& g) { return g.open; }))
    return;
  phase_ = Phase::current;
  watch_.stop();
}

bool ParamSync::on_read(const at::Tensor& tensor) noexcept {
  if (!tensor.defined() || !tensor.has_storage()) return false;
  const auto* const storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (has_units()) return use_unit(storage);
  if (busy_) return false;
  const Busy busy(busy_);
  for (Gather& gather : gathers_) {
    if (gather.open || (storage != gather.closed.unsafeGetStorageImpl() &&
                        storage != gather.storage.unsafeGetStorageImpl()))
      continue;
    const ElementRange read = span_of(tensor), whole = span_of(gather.whole);
    if (read.start >= whole.end || whole.start >= read.end) continue;
    try {
      wait(gather);
    } catch (const std::exception&) {  // the operator throws it when it reads
    }
  }
  settle();
  return false;
}

}  // namespace lockstep
