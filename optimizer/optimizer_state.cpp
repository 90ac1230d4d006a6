#include "lockstep/optimizer/optimizer_state.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/flat_tensor.h"
#include "lockstep/core/narrow_dtype.h"
#include "lockstep/core/planned_cpu.h"
#include "lockstep/core/upload.h"

namespace lockstep {
namespace {

at::Tensor slice(const at::Tensor& tensor, const ElementRange& range) {
  return tensor.defined() ? tensor.slice(0, range.start, range.end) : tensor;
}

/// Calls `visit` with the index of each parameter of `buffer` that overlaps `owned` and the
/// overlapping range, in coordinates of the buffer.
template <class Visit>
void visit_owned(const ParamAndGradBuffer& buffer, const ElementRange& owned, Visit visit) {
  for (const ParamLayout::Bucket& bucket : buffer.layout().buckets) {
    if (bucket.end <= owned.start || bucket.start >= owned.end) continue;
    for (const int64_t index : bucket.params) {
      const auto& slot = buffer.layout().slots[static_cast<size_t>(index)];
      const ElementRange part = {std::max(slot.start, owned.start), std::min(slot.end, owned.end)};
      if (part.start < part.end) visit(static_cast<size_t>(index), part);
    }
  }
}

/// The dtype of the state that a rule keeps for weights of dtype `weights`.
at::ScalarType dtype_of(const UpdateState& kept, at::ScalarType weights,
                        const UpdateStatement& rule) {
  if (kept.dtype == StateDtype::fp32) return weights;
  require<ConfigError>(weights == at::kFloat,
                       "{}: found bf16, allowed with fp64 parameters: fp32, which then stands for "
                       "fp64",
                       kept.setting.empty()
                           ? fmt::format("update rule {}, state {}", rule.name, kept.name)
                           : kept.setting);
  return at::kBFloat16;
}

}  // namespace

OptimizerState::OptimizerState(const ParamAndGradBuffer& buffer,
                               std::shared_ptr<const UpdateRule> rule, std::vector<size_t> group_of,
                               Offload offload)
    : buffer_(&buffer),
      rule_(std::move(rule)),
      group_of_(std::move(group_of)),
      offloaded_(offload != Offload::none) {
  for (int64_t start = 0; const ElementRange& owned : buffer.owned()) {
    pieces_.push_back({owned, {start, start + owned.numel()}, segments_of(owned)});
    start += owned.numel();
  }
  const at::ScalarType dtype = buffer.param_data().scalar_type();
  require<ConfigError>(is_narrow(dtype) || dtype == at::kFloat || dtype == at::kDouble,
                       "optimizer: parameter '{}' is {}, allowed: Float, Double, BFloat16, Half",
                       buffer.params().front().name, at::toString(dtype));
  fetches_params_ = !is_narrow(dtype) || offload == Offload::may_leave_some;
  allocate(dtype);
  read_params();
}

void OptimizerState::allocate(at::ScalarType dtype) {
  const int64_t numel = buffer_->owned_numel();
  const at::TensorOptions of_device = buffer_->param_data().options();
  const bool on_host = offloaded_ && !buffer_->param_data().is_meta();
  const OnPlannedHost planned(offloaded_);
  const at::TensorOptions options = on_host ? of_device.device(at::kCPU) : of_device;
  const at::ScalarType wide = is_narrow(dtype) ? at::kFloat : dtype;
  const auto zeros = [&](at::ScalarType of) { return flat_zeros(numel, options.dtype(of)); };
  if (is_narrow(dtype)) master_ = zeros(wide);
  for (const UpdateState& kept : rule_->statement().state)
    of_rule_.push_back(zeros(dtype_of(kept, wide, rule_->statement())));
  if (!offloaded_) return;
  const at::TensorOptions locked = on_host ? options.pinned_memory(true) : options;
  host_grads_ = at::zeros({numel}, locked.dtype(buffer_->grad_data().scalar_type()));
  host_params_ = at::zeros({numel}, locked.dtype(dtype));
}

void OptimizerState::fetch() {
  if (!offloaded_) return;
  const OnPlannedHost planned;
  for (const Piece& piece : pieces_)
    slice(host_grads_, piece.in_state)
        .copy_(buffer_->held_grads(piece.in_buffer), /*non_blocking=*/true);
  if (!fetches_params_) return;
  for (const Piece& piece : pieces_)
    slice(host_params_, piece.in_state)
        .copy_(buffer_->owned_params(piece.in_buffer), /*non_blocking=*/true);
}

UpdateRange OptimizerState::views_of(const ElementRange& in_buffer, int64_t start_in_state) const {
  const ElementRange in_state = {start_in_state, start_in_state + in_buffer.numel()};
  const at::Tensor param =
      offloaded_ ? slice(host_params_, in_state) : buffer_->owned_params(in_buffer);
  const at::Tensor master = slice(master_, in_state);
  UpdateRange views;
  views.weights = master.defined() ? master : param;
  views.grad = offloaded_ ? slice(host_grads_, in_state) : buffer_->held_grads(in_buffer);
  if (master.defined()) views.copy = param;
  for (const at::Tensor& kept : of_rule_) views.state.push_back(slice(kept, in_state));
  return views;
}

/// The ranges of `owned` that hold parameters, relative to its start; neighbours of one group are
/// merged. A gap inside a range has zero gradients and parameters, which stay zero.
OptimizerState::Segments OptimizerState::segments_of(const ElementRange& owned) const {
  std::map<size_t, std::vector<kernels::UpdateSegment>> segments;
  std::optional<size_t> last;
  visit_owned(*buffer_, owned, [&](size_t index, const ElementRange& part) {
    const size_t group = group_of_[index];
    const int64_t start = part.start - owned.start, end = part.end - owned.start;
    if (last == group)
      segments[group].back().end = end;
    else
      segments[group].push_back({start, end});
    last = group;
  });
  return {segments.begin(), segments.end()};
}

void OptimizerState::step(size_t range, const std::vector<ParamGroup>& groups, double weight_decay,
                          int64_t step, const kernels::StepControl& control) {
  const Piece& piece = pieces_[range];
  const OnPlannedHost planned(offloaded_);
  const auto update = [&](UpdateRange& views, size_t group) {
    views.learning_rate = groups[group].lr;
    views.weight_decay = weight_decay * groups[group].wd_mult;
    views.step = step;
    views.control = control;
    if (numbers_.defined())
      views.control = at::cat({control, numbers_[static_cast<int64_t>(group)]});
    rule_->update(views);
  };
  if (rule_->statement().unit == UpdateUnit::matrix) return for_matrices(piece, update);
  UpdateRange views = views_of(piece.in_buffer, piece.in_state.start);
  for (const auto& [group, segments] : piece.segments) {
    views.segments = segments;
    update(views, group);
  }
  if (offloaded_)
    buffer_->owned_params(piece.in_buffer)
        .copy_(slice(host_params_, piece.in_state), /*non_blocking=*/true);
}

int64_t OptimizerState::count_numbers() const {
  const auto count = static_cast<int64_t>(rule_->step_numbers(0, 0, 1).size());
  require<UsageError>(count > 0,
                      "optimizer: the updates of {} cannot be recorded, because it has no "
                      "step_numbers(); allowed: adam, sgd, or a rule that has",
                      rule_->statement().name);
  return count;
}

void OptimizerState::keep_numbers_on_device(size_t groups) {
  numbers_ = at::zeros({static_cast<int64_t>(groups), count_numbers()},
                       buffer_->param_data().options().dtype(at::kDouble));
}

void OptimizerState::upload_numbers(const std::vector<ParamGroup>& groups, double weight_decay,
                                    int64_t step) {
  std::vector<double> all;
  for (const ParamGroup& group : groups) {
    const auto of_group = rule_->step_numbers(group.lr, weight_decay * group.wd_mult, step);
    all.insert(all.end(), of_group.begin(), of_group.end());
  }
  upload_to(numbers_, at::tensor(all, at::kDouble).view(numbers_.sizes()));
}

template <class Call>
void OptimizerState::for_matrices(const Piece& piece, Call call) const {
  visit_owned(*buffer_, piece.in_buffer, [&](size_t index, const ElementRange& part) {
    UpdateRange views = views_of(part, part.start - piece.in_buffer.start + piece.in_state.start);
    views.segments = {{0, part.numel()}};
    views.parameter = &buffer_->params()[index];
    call(views, group_of_[index]);
  });
}

std::vector<OptimizerState::Named> OptimizerState::tensors() const {
  std::vector<Named> named;
  if (master_.defined()) named.push_back({"master", master_});
  const std::vector<UpdateState>& kept = rule_->statement().state;
  for (size_t i = 0; i < kept.size(); ++i) named.push_back({kept[i].name, of_rule_[i]});
  return named;
}

void OptimizerState::list(std::vector<StateSlice>& slices) const {
  for (const Piece& piece : pieces_)
    visit_owned(*buffer_, piece.in_buffer, [&](size_t index, const ElementRange& part) {
      const NamedParameter& param = buffer_->params()[index];
      const int64_t start = buffer_->layout().slots[index].start;
      const int64_t shift = piece.in_state.start - piece.in_buffer.start;
      StateSlice& added =
          slices.emplace_back(StateSlice{.parameter = param.name,
                                         .description = param.description,
                                         .shape = param.tensor.sizes().vec(),
                                         .range = {part.start - start, part.end - start},
                                         .values = {}});
      for (const Named& one : tensors())
        added.values.push_back(
            {one.name, slice(one.tensor, {part.start + shift, part.end + shift})});
    });
}

void OptimizerState::write_params() {
  if (!master_.defined()) return;
  for (const Piece& piece : pieces_)
    buffer_->owned_params(piece.in_buffer).copy_(slice(master_, piece.in_state));
  note_change();
}

void OptimizerState::read_params() {
  if (!master_.defined()) return;
  for (const Piece& piece : pieces_)
    slice(master_, piece.in_state).copy_(buffer_->owned_params(piece.in_buffer));
}

void OptimizerState::note_change() {
  // The reads run in parallel; locked increments would wait for each other's memory.
  for (const NamedParameter& param : buffer_->params()) param.tensor._version();
  for (const NamedParameter& param : buffer_->params())
    param.tensor.unsafeGetTensorImpl()->bump_version();
}

int64_t OptimizerState::bytes() const {
  int64_t bytes = 0;
  for (const Named& one : tensors()) bytes += static_cast<int64_t>(one.tensor.nbytes());
  return bytes;
}

}  // namespace lockstep
