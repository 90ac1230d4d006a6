#include "lockstep/optimizer/whole_matrices.h"

#include <ATen/ATen.h>

#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

std::optional<int64_t> cut_dim(const NamedParameter& param, MeshAxis axis) {
  const Placement placement = param.description.placement(axis);
  const auto* const shard = std::get_if<Shard>(&placement);
  if (!shard) return {};
  return shard->dim < 0 ? shard->dim + param.tensor.dim() : shard->dim;
}

class WholeMatrices final : public UpdateRule {
 public:
  WholeMatrices(std::shared_ptr<const UpdateRule> rule, const ParallelState& state)
      : UpdateRule(rule->statement()), rule_(std::move(rule)), state_(state) {}

  void update(const UpdateRange& range) const override {
    const MatrixCut cut(*range.parameter, state_);
    if (!cut.is_cut()) return rule_->update(range);
    const at::IntArrayRef shape = range.parameter->tensor.sizes();
    const auto joined = [&](const at::Tensor& flat) {
      return cut.joined(flat.view(shape), cut.dim()).contiguous();
    };
    NamedParameter param = {range.parameter->name, joined(range.weights),
                            range.parameter->description};
    param.description.placements.erase(cut.axis());
    UpdateRange whole = range;
    whole.parameter = &param;
    whole.weights = param.tensor.view(-1);
    whole.grad = joined(range.grad).view(-1);
    whole.copy = at::Tensor();
    whole.segments = {{0, param.tensor.numel()}};
    for (at::Tensor& one : whole.state) one = joined(one).view(-1);
    rule_->update(whole);

    const auto take = [&](const at::Tensor& target, const at::Tensor& flat) {
      target.view(shape).copy_(cut.own(flat.view(param.tensor.sizes()), cut.dim()));
    };
    take(range.weights, whole.weights);
    if (range.copy.defined()) at::Tensor(range.copy).copy_(range.weights);
    for (size_t i = 0; i < range.state.size(); ++i) take(range.state[i], whole.state[i]);
  }

  std::vector<double> step_numbers(double rate, double decay, int64_t step) const override {
    return rule_->step_numbers(rate, decay, step);
  }

 private:
  std::shared_ptr<const UpdateRule> rule_;
  ParallelState state_;
};

}  // namespace

MatrixCut::MatrixCut(const NamedParameter& param, const ParallelState& state)
    : axis_(tensor_axis(param.description)),
      group_(state.group(group_kind_of(axis_))),
      dim_(group_.size() > 1 ? cut_dim(param, axis_) : std::nullopt),
      label_("matrix of '" + param.name + "'") {}

at::Tensor MatrixCut::joined(const at::Tensor& piece, int64_t dim) const {
  std::vector<int64_t> shape = piece.sizes().vec();
  shape.insert(shape.begin(), group_.size());
  const at::Tensor pieces = at::empty(shape, piece.options());
  all_gather(group_, pieces.view(-1), piece.contiguous().view(-1), label_).wait();
  return at::cat(pieces.unbind(0), dim);
}

at::Tensor MatrixCut::own(const at::Tensor& whole, int64_t dim) const {
  return whole.chunk(group_.size(), dim)[static_cast<size_t>(group_.rank())];
}

std::shared_ptr<const UpdateRule> with_whole_matrices(std::shared_ptr<const UpdateRule> rule,
                                                      const ParallelState& state) {
  return std::make_shared<WholeMatrices>(std::move(rule), state);
}

}  // namespace lockstep
