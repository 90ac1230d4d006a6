#include "lockstep/optimizer/clip_grad_norm.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/gradient_hook.h"
#include "lockstep/distributed/notify_on_error.h"
#include "lockstep/distributed/parameter_check.h"
#include "lockstep/optimizer/clip_formula.h"
#include "lockstep/optimizer/norms.h"

namespace lockstep {
namespace {

/// The ranks that shard some parameters, and the gradients of these that this rank counts.
struct ShardClass {
  std::optional<ProcessGroup> group;  ///< unset: nothing to combine
  std::vector<at::Tensor> pieces = {};
};

/// Whether a parameter counts in the sum over the stages: only on the first stage that holds it.
bool counts_on_this_stage(const MeshParameter& param, const std::vector<std::string>& replicated,
                          const std::optional<DeviceMesh>& pp_mesh) {
  if (!pp_mesh || replicated.empty()) return true;
  const DeviceMesh& mesh = param.dtensor->device_mesh();
  const int64_t rank = mesh.parallel_state().rank();
  const RankList copies = mesh.layout().group(replicated, rank);
  for (const int64_t stage : pp_mesh->layout().ranks())
    if (std::find(copies.begin(), copies.end(), stage) != copies.end()) return stage == rank;
  return true;
}

/// A plain parameter counts as a whole, on each stage that has it.
void refuse_miscounted(const MeshParameter& param, const std::optional<DeviceMesh>& pp_mesh) {
  if (!param.description || param.dtensor) return;
  bool counts_once = !pp_mesh || !param.description->is_on_several_stages();
  for (const auto& [axis, placement] : param.description->placements)
    counts_once = counts_once && placement == Placement(Replicate{});
  require<UsageError>(counts_once,
                      "clip_grad_norm_: parameter '{}' is described as '{}', allowed in a list "
                      "without a mesh: replicated ones of one stage; use clip_grad_norm_(module, "
                      "state, ...)",
                      param.name, param.description->to_string());
}

constexpr std::array kGradientTypes = {at::kFloat, at::kDouble,       at::kBFloat16,
                                       at::kHalf,  at::kComplexFloat, at::kComplexDouble};

void check_gradient(const MeshParameter& param, bool clips) {
  const at::Tensor& grad = param.tensor.grad();
  require<UsageError>(grad.layout() == at::kStrided,
                      "clip_grad_norm_: the gradient of '{}' is sparse, allowed: dense gradients",
                      param.name);
  if (std::find(kGradientTypes.begin(), kGradientTypes.end(), grad.scalar_type()) ==
      kGradientTypes.end()) {
    std::vector<std::string> allowed;
    for (const at::ScalarType type : kGradientTypes) allowed.emplace_back(at::toString(type));
    fail<UsageError>("clip_grad_norm_: the gradient of '{}' is {}, allowed: {}", param.name,
                     at::toString(grad.scalar_type()), fmt::join(allowed, ", "));
  }
  require<UsageError>(!clips || !may_overlap(without_repetition(grad)),
                      "clip_grad_norm_: the gradient of '{}' has elements that share memory, "
                      "allowed: elements of their own, or a tensor that was expanded",
                      param.name);
}

/// Makes it contiguous and applies a lazy conjugation or negation.
at::Tensor flat_copy_or_view(const at::Tensor& grad) {
  return grad.detach().resolve_conj().resolve_neg().contiguous().view({-1});
}

/// The order depends only on the ranks of the groups; local parameters come last.
std::vector<ShardClass> make_classes(const MeshParameters& parameters,
                                     const std::optional<DeviceMesh>& pp_mesh, bool clips) {
  std::map<RankList, ShardClass> sharded;
  ShardClass local;
  for (const MeshParameter& param : parameters) {
    refuse_miscounted(param, pp_mesh);
    const ParameterAxes axes = axes_of(param);
    ShardClass* found = &local;
    if (!axes.sharded.empty()) {
      const ProcessGroup group = param.dtensor->device_mesh().get_group(axes.sharded);
      if (group.size() > 1)
        found = &sharded.try_emplace(group.ranks(), ShardClass{group}).first->second;
    }
    const at::Tensor& grad = param.tensor.grad();
    refuse_unfinished(param.name, param.tensor, "clip_grad_norm_");  // sharded: undefined
    if (!grad.defined()) continue;
    if (param.description) refuse_not_final(param.name, param.tensor, "clip_grad_norm_");
    check_gradient(param, clips);
    if (counts_on_this_stage(param, axes.replicated, pp_mesh))
      found->pieces.push_back(flat_copy_or_view(grad));
  }
  std::vector<ShardClass> classes;
  classes.reserve(sharded.size() + 1);
  for (auto& [ranks, entry] : sharded) classes.push_back(std::move(entry));
  classes.push_back(std::move(local));
  return classes;
}

/// Reduces over the ranks of each class, in place.
void reduce_classes(const std::vector<ShardClass>& classes, const std::vector<at::Tensor>& of_class,
                    ReduceOp op, const char* label) {
  std::vector<Work> works;
  for (size_t i = 0; i < classes.size(); ++i)
    if (classes[i].group) works.push_back(all_reduce(*classes[i].group, of_class[i], op, label));
  for (Work& work : works) work.wait();
}

/// Combines the classes of a rank, then reduces over the stages.
at::Tensor combine_classes(const std::optional<DeviceMesh>& pp_mesh,
                           const std::vector<at::Tensor>& of_class, ReduceOp op,
                           const char* label) {
  const at::Tensor all = at::stack(of_class);
  at::Tensor total = op == ReduceOp::max ? all.max() : all.sum();
  if (pp_mesh) all_reduce(pp_mesh->get_group(), total, op, label).wait();
  return total;
}

/// For p = 2 and infinity in one step; otherwise class by class first, because the ranks of a class
/// must divide its elements by the same number, while other classes may use another.
at::Tensor norm_over_meshes(const std::vector<ShardClass>& classes, double p, c10::Device device,
                            const std::optional<DeviceMesh>& pp_mesh) {
  PieceClasses pieces;
  for (const ShardClass& entry : classes) pieces.push_back(entry.pieces);
  const ReduceClasses reduce = [&](const std::vector<at::Tensor>& of_class, ReduceOp op,
                                   const char* label) {
    reduce_classes(classes, of_class, op, label);
  };
  const bool by_class = p != 2 && !std::isinf(p);
  if (by_class) pieces = {{at::stack(norms_of_classes(pieces, p, device, reduce))}};
  return norm_of_pieces(
      pieces, p, device,
      [&](const std::vector<at::Tensor>& of_class, ReduceOp op, const char* label) {
        if (!by_class) reduce(of_class, op, label);
        return combine_classes(pp_mesh, of_class, op, label);
      });
}

void refuse_nonfinite(const MeshParameters& parameters, double norm, double norm_type) {
  if (std::isfinite(norm)) return;
  std::string where = "none of this rank's gradients is at fault";
  for (const MeshParameter& param : parameters) {
    const at::Tensor& grad = param.tensor.grad();
    if (!grad.defined() || at::isfinite(grad).all().item<bool>()) continue;
    where = fmt::format("the gradient of '{}' holds NaN or infinity", param.name);
    break;
  }
  fail<UsageError>("clip_grad_norm_: the {}-norm of the gradients is {}, allowed: a finite one; {}",
                   norm_type, norm, where);
}

void scale(const MeshParameters& parameters, const at::Tensor& coefficient, bool foreach) {
  std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>> lists;
  for (const MeshParameter& param : parameters) {
    if (!param.tensor.grad().defined()) continue;
    at::Tensor grad = without_repetition(param.tensor.grad());
    const at::ScalarType dtype = grad.scalar_type();
    if (foreach && (dtype == at::kFloat || dtype == at::kDouble))
      lists[{grad.device().str(), dtype}].push_back(grad);
    else
      grad.mul_(coefficient);
  }
  for (auto& [key, grads] : lists) at::_foreach_mul_(grads, coefficient.to(key.second));
}

}  // namespace

at::Tensor clip_grad_norm_(const MeshParameters& parameters, std::optional<double> max_norm,
                           double norm_type, bool error_if_nonfinite, std::optional<bool> foreach,
                           const std::optional<DeviceMesh>& pp_mesh) {
  const at::NoGradGuard no_grad;
  const ParallelState* const job = pp_mesh ? &pp_mesh->parallel_state() : parameters.job();
  const std::vector<ShardClass> classes = notify_on_error(job, [&] {
    require<UsageError>(norm_type > 0, "clip_grad_norm_: norm_type: found {}, allowed: > 0",
                        norm_type);
    require<UsageError>(!max_norm || *max_norm >= 0,
                        "clip_grad_norm_: max_norm: found {}, allowed: >= 0", max_norm.value_or(0));
    parameters.check();
    return make_classes(parameters, pp_mesh, max_norm.has_value());
  });
  c10::Device device = c10::kCPU;
  if (parameters.size() > 0) device = parameters[0].tensor.device();
  if (pp_mesh) device = pp_mesh->parallel_state().device();
  const at::Tensor norm = norm_over_meshes(classes, norm_type, device, pp_mesh);
  if (error_if_nonfinite) refuse_nonfinite(parameters, norm.item<double>(), norm_type);
  if (max_norm) scale(parameters, clip_factor(norm, *max_norm), foreach.value_or(true));
  return norm;
}

at::Tensor clip_grad_norm_(const torch::nn::Module& module, const ParallelState& state,
                           std::optional<double> max_norm, double norm_type,
                           bool error_if_nonfinite, std::optional<bool> foreach) {
  std::optional<DeviceMesh> stages;
  if (state.grids().size(GroupKind::pp) > 1) stages = DeviceMesh::dense(state)["pp"];
  return clip_grad_norm_(mesh_parameters(module, state), max_norm, norm_type, error_if_nonfinite,
                         foreach, stages);
}

}  // namespace lockstep
