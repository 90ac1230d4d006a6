#include "lockstep/optimizer/optimizer_state.h"

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/flat_tensor.h"
#include "lockstep/kernels/adamw.h"
#include "lockstep/kernels/sgd.h"
#include "lockstep/optimizer/orthogonalize.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/parallel_state/collectives.h"

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

/// The dtype of a moment beside weights of dtype `weights`.
at::ScalarType moment_dtype(StateDtype choice, at::ScalarType weights, const char* field) {
  if (choice == StateDtype::fp32) return weights;
  require<ConfigError>(weights == at::kFloat,
                       "optimizer.{}: found bf16, allowed with fp64 parameters: fp32, which then "
                       "stands for fp64",
                       field);
  return at::kBFloat16;
}

kernels::AdamWScalars adamw_scalars(const OptimizerConfig& config, const ParamGroup& group,
                                    int64_t step) {
  const auto steps = static_cast<double>(step);
  return {.learning_rate = group.lr,
          .beta1 = config.adam_beta1,
          .beta2 = config.adam_beta2,
          .eps = config.adam_eps,
          .weight_decay = config.weight_decay * group.wd_mult,
          .bias_correction1 = 1 - std::pow(config.adam_beta1, steps),
          .bias_correction2 = 1 - std::pow(config.adam_beta2, steps)};
}

}  // namespace

OptimizerState::OptimizerState(const ParamAndGradBuffer& buffer, const OptimizerConfig& config,
                               const ParallelState& parallel_state, std::vector<size_t> group_of)
    : buffer_(&buffer),
      parallel_state_(parallel_state),
      group_of_(std::move(group_of)),
      rule_(rule_of(config.optimizer, buffer.holds_whole_matrices())) {
  int64_t numel = 0;
  for (const ElementRange& owned : buffer.owned()) {
    pieces_.push_back({owned, {numel, numel + owned.numel()}, segments_of(owned)});
    numel += owned.numel();
  }
  const at::ScalarType dtype = buffer.param_data().scalar_type();
  const bool narrow = dtype == at::kBFloat16 || dtype == at::kHalf;
  require<ConfigError>(narrow || dtype == at::kFloat || dtype == at::kDouble,
                       "optimizer: parameter '{}' is {}, allowed: Float, Double, BFloat16, Half",
                       buffer.params().front().name, at::toString(dtype));
  const at::ScalarType wide = narrow ? at::kFloat : dtype;
  const auto zeros = [&](at::ScalarType of) {
    return flat_zeros(numel, buffer.param_data().options().dtype(of));
  };
  if (narrow) master_ = zeros(wide);
  if (rule_ == UpdateRule::adam) {
    exp_avg_ = zeros(moment_dtype(config.exp_avg_dtype, wide, "exp_avg_dtype"));
    exp_avg_sq_ = zeros(moment_dtype(config.exp_avg_sq_dtype, wide, "exp_avg_sq_dtype"));
  } else if (rule_ == UpdateRule::muon || config.sgd_momentum > 0) {
    momentum_ = zeros(wide);
  }
  read_params();
}

OptimizerState::Views OptimizerState::views_of(const ElementRange& in_buffer,
                                               int64_t start_in_state) const {
  const ElementRange in_state = {start_in_state, start_in_state + in_buffer.numel()};
  return {slice(buffer_->param_data(), in_buffer),
          slice(buffer_->grad_data(), in_buffer),
          slice(master_, in_state),
          slice(exp_avg_, in_state),
          slice(exp_avg_sq_, in_state),
          slice(momentum_, in_state)};
}

/// Ranges of `owned` that hold parameters, counted from its start, neighbours of one group merged.
/// A gap that lies inside a range is zero in gradient and parameter, and stays so.
OptimizerState::Segments OptimizerState::segments_of(const ElementRange& owned) const {
  Segments segments;
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
  return segments;
}

void OptimizerState::step(size_t range, const OptimizerConfig& config,
                          const std::vector<ParamGroup>& groups, int64_t step,
                          const kernels::StepControl& control) {
  const Piece& piece = pieces_[range];
  const Views views = views_of(piece.in_buffer, piece.in_state.start);
  if (rule_ == UpdateRule::adam)
    for (const auto& [group, segments] : piece.segments)
      kernels::adamw(views.weights(), views.grad, views.exp_avg, views.exp_avg_sq, views.copy(),
                     segments, adamw_scalars(config, groups[group], step), control);
  else if (rule_ == UpdateRule::sgd)
    for (const auto& [group, segments] : piece.segments)
      kernels::sgd(views.weights(), views.grad, views.momentum, views.copy(), segments,
                   {.learning_rate = groups[group].lr,
                    .momentum = config.sgd_momentum,
                    .weight_decay = config.weight_decay * groups[group].wd_mult},
                   control);
  else
    step_muon(config, groups, piece, control);
}

void OptimizerState::step_muon(const OptimizerConfig& config, const std::vector<ParamGroup>& groups,
                               const Piece& piece, const kernels::StepControl& control) {
  const at::Tensor apply = control[1].ne(0);
  visit_owned(*buffer_, piece.in_buffer, [&](size_t index, const ElementRange& part) {
    const NamedParameter& param = buffer_->params()[index];
    const Views views = views_of(part, part.start - piece.in_buffer.start + piece.in_state.start);
    const auto matrix = [&](const at::Tensor& flat) {
      return flat.view({-1, param.tensor.size(-1)});
    };
    at::Tensor weights = matrix(views.weights()), momentum = matrix(views.momentum);
    const at::Tensor grad = matrix(views.grad).to(weights.scalar_type()) * control[0];
    const at::Tensor mean = momentum.lerp(grad, 1 - config.muon_momentum);
    const at::Tensor update =
        config.muon_use_nesterov ? grad.lerp(mean, config.muon_momentum) : mean;
    const ParamGroup& group = groups[group_of_[index]];
    const double decay = group.lr * config.weight_decay * group.wd_mult;
    const at::Tensor stepped =
        at::add(weights * (1 - decay), orthogonal_update(param, update, config), -group.lr);
    momentum.copy_(at::where(apply, mean, momentum));
    weights.copy_(at::where(apply, stepped, weights));
    if (views.master.defined()) at::Tensor(views.param).copy_(views.master);
  });
}

at::Tensor OptimizerState::orthogonal_update(const NamedParameter& param, const at::Tensor& update,
                                             const OptimizerConfig& config) const {
  const MeshAxis axis = tensor_axis(param.description);
  const Placement placement = param.description.placement(axis);
  const ProcessGroup group = parallel_state_.group(group_kind_of(axis));
  const auto* const shard = std::get_if<Shard>(&placement);
  const auto direction = [&](const at::Tensor& whole) {
    return muon_direction(whole, config, param.description.rows_of_matrices);
  };
  if (!shard || group.size() == 1) return direction(update);
  const at::Tensor own = update.contiguous();
  const at::Tensor parts =
      at::empty({group.size(), update.size(0), update.size(1)}, update.options());
  all_gather(group, parts.view(-1), own.view(-1), "matrix of '" + param.name + "'").wait();
  const int64_t cut = shard->dim == param.tensor.dim() - 1 ? 1 : 0;
  const at::Tensor whole = at::cat(parts.unbind(0), cut);
  return direction(whole).chunk(group.size(), cut)[static_cast<size_t>(group.rank())];
}

std::vector<OptimizerState::Named> OptimizerState::tensors() const {
  std::vector<Named> named = {{"master", master_},
                              {"exp_avg", exp_avg_},
                              {"exp_avg_sq", exp_avg_sq_},
                              {"momentum_buffer", momentum_}};
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
  // Reads go on side by side, locked increments wait for each other's memory.
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
