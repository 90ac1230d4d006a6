#include "lockstep/optimizer/optimizer_state.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

at::Tensor slice(const at::Tensor& tensor, const ElementRange& range) {
  return tensor.defined() ? tensor.slice(0, range.start, range.end) : tensor;
}

/// Gives `visit` the index of each parameter of `buffer` that lies in `owned` and the part that
/// does, in coordinates of the buffer.
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

/// Ranges of `owned` that hold parameters, counted from its start, neighbours with equal weight
/// decay merged. A gap that lies inside a range is zero in gradient and parameter, and stays so.
std::vector<kernels::AdamWSegment> segments_of(const ParamAndGradBuffer& buffer,
                                               const ElementRange& owned) {
  std::vector<kernels::AdamWSegment> segments;
  visit_owned(buffer, owned, [&](size_t index, const ElementRange& part) {
    const bool decay = buffer.params()[index].description.apply_weight_decay;
    const int64_t start = part.start - owned.start, end = part.end - owned.start;
    if (!segments.empty() && segments.back().weight_decay == decay)
      segments.back().end = end;
    else
      segments.push_back({start, end, decay});
  });
  return segments;
}

}  // namespace

OptimizerState::OptimizerState(const ParamAndGradBuffer& buffer) : buffer_(&buffer) {
  int64_t numel = 0;
  for (const ElementRange& owned : buffer.owned()) {
    pieces_.push_back({owned, {numel, numel + owned.numel()}, segments_of(buffer, owned)});
    numel += owned.numel();
  }
  const at::ScalarType dtype = buffer.param_data().scalar_type();
  require<ConfigError>(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16,
                       "optimizer: parameter '{}' is {}, allowed: Float, Double, BFloat16",
                       buffer.params().front().name, at::toString(dtype));
  const bool separate = dtype == at::kBFloat16;
  const auto options = buffer.param_data().options().dtype(separate ? at::kFloat : dtype);
  if (separate) master_ = at::empty({numel}, options);
  exp_avg_ = at::zeros({numel}, options);
  exp_avg_sq_ = at::zeros({numel}, options);
  read_params();
}

void OptimizerState::step(const kernels::AdamWScalars& scalars) {
  for (const Piece& piece : pieces_) {
    const at::Tensor param = slice(buffer_->param_data(), piece.in_buffer);
    const at::Tensor master = slice(master_, piece.in_state);
    kernels::adamw(master.defined() ? master : param, slice(buffer_->grad_data(), piece.in_buffer),
                   slice(exp_avg_, piece.in_state), slice(exp_avg_sq_, piece.in_state),
                   master.defined() ? param : at::Tensor(), piece.segments, scalars);
  }
  note_change();
}

std::vector<OptimizerState::Named> OptimizerState::tensors() const {
  std::vector<Named> named = {
      {"master", master_}, {"exp_avg", exp_avg_}, {"exp_avg_sq", exp_avg_sq_}};
  std::erase_if(named, [](const Named& one) { return !one.tensor.defined(); });
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
    slice(buffer_->param_data(), piece.in_buffer).copy_(slice(master_, piece.in_state));
  note_change();
}

void OptimizerState::read_params() {
  if (!master_.defined()) return;
  for (const Piece& piece : pieces_)
    slice(master_, piece.in_state).copy_(slice(buffer_->param_data(), piece.in_buffer));
}

void OptimizerState::note_change() {
  for (const NamedParameter& param : buffer_->params())
    param.tensor.unsafeGetTensorImpl()->bump_version();
}

int64_t OptimizerState::bytes() const {
  int64_t bytes = 0;
  for (const Named& one : tensors()) bytes += static_cast<int64_t>(one.tensor.nbytes());
  return bytes;
}

}  // namespace lockstep
