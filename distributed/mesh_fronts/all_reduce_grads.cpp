#include "lockstep/distributed/all_reduce_grads.h"

#include <algorithm>
#include <array>
#include <map>
#include <string_view>
#include <tuple>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/core/check.h"
#include "lockstep/core/text_digest.h"
#include "lockstep/distributed/description_check.h"
#include "lockstep/distributed/gradient_hook.h"
#include "lockstep/distributed/gradient_scaling.h"
#include "lockstep/distributed/mesh_reduction.h"
#include "lockstep/distributed/notify_on_error.h"
#include "lockstep/distributed/param_layout.h"
#include "lockstep/distributed/parameter_check.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

constexpr int64_t kBucketBytes = int64_t{25} << 20;

/// A trained parameter that has a gradient on some rank, and that gradient's dtype.
struct Reduced {
  const MeshParameter* param;
  at::ScalarType dtype;
};

/// A gradient, and the tensor that is sent for it: itself, or a contiguous copy.
struct Travelling {
  at::Tensor grad;
  at::Tensor sent;
};

using Trained = std::vector<const MeshParameter*>;

/// Names, shapes and dtypes as one number.
uint64_t digest_of(const Trained& trained) {
  const auto bytes_of = [](const auto& numbers) {
    return std::string_view(reinterpret_cast<const char*>(numbers.data()),
                            numbers.size() * sizeof(int64_t));
  };
  uint64_t digest = text_digest("");
  for (const MeshParameter* param : trained) {
    const at::Tensor& tensor = param->tensor;
    const std::array<int64_t, 2> form = {tensor.dim(), static_cast<int64_t>(tensor.scalar_type())};
    digest = text_digest(bytes_of(form), text_digest(param->name, digest));
    digest = text_digest(bytes_of(tensor.sizes()), digest);
  }
  return digest;
}

void check_same_list(const MeshParameters& model, const Trained& trained,
                     const ProcessGroup& group) {
  const bool refused = !model.fault().empty();
  const uint64_t digest = refused ? text_digest(model.fault()) : digest_of(trained);
  if (is_same_on_all_ranks(digest, group, "parameters of all_reduce_grads")) return model.check();
  std::vector<NamedParameter> named;
  for (const MeshParameter& param : model) named.push_back({param.name, param.tensor, {}});
  check_same_parameters(named, group, {}, [&] { model.check(); });
}

/// The gradient that a rank has for a parameter, the worst case last.
enum Presence : int { kAbsent, kDense, kSparse, kOverlapping, kNoFloat };

Presence presence_of(const at::Tensor& grad) {
  if (!grad.defined()) return kAbsent;
  if (grad.layout() != at::kStrided) return kSparse;
  if (!at::isFloatingType(grad.scalar_type())) return kNoFloat;
  return may_overlap(grad) ? kOverlapping : kDense;
}

void refuse_presence(int found, const std::string& name) {
  require<UsageError>(found != kSparse,
                      "all_reduce_grads: the gradient of '{}' is sparse, allowed: dense gradients",
                      name);
  require<UsageError>(found != kOverlapping,
                      "all_reduce_grads: the gradient of '{}' has elements that share memory, "
                      "allowed: dense gradients",
                      name);
  require<UsageError>(found != kNoFloat,
                      "all_reduce_grads: the gradient of '{}' is not a floating-point tensor, "
                      "allowed: floating-point gradients",
                      name);
}

Trained trained_of(const MeshParameters& model) {
  Trained trained;
  for (const MeshParameter& param : model)
    if (param.tensor.requires_grad()) trained.push_back(&param);
  return trained;
}

/// What the ranks tell each other of a gradient; each byte becomes the maximum over the ranks.
struct Claim {
  int8_t presence = kAbsent;
  int8_t highest_dtype = 0;  ///< 0 without a gradient
  int8_t lowest_dtype = 0;   ///< kLast minus the dtype; 0 without a gradient
  int8_t unused = 0;

  static constexpr int kLast = 127;
};
static_assert(sizeof(Claim) == 4 && static_cast<int>(at::ScalarType::NumOptions) < Claim::kLast);

Claim claim_of(const at::Tensor& grad) {
  if (!grad.defined()) return {};
  const auto dtype = static_cast<int>(grad.scalar_type());
  return {static_cast<int8_t>(presence_of(grad)), static_cast<int8_t>(dtype),
          static_cast<int8_t>(Claim::kLast - dtype)};
}

/// The trained parameters that have a gradient on some rank of the group.
std::vector<Reduced> parameters_with_gradients(const Trained& trained, const ProcessGroup& group) {
  std::vector<Reduced> result;
  if (trained.empty()) return result;
  at::Tensor bytes = at::zeros({static_cast<int64_t>(trained.size() * sizeof(Claim))}, at::kChar);
  auto* const claims = reinterpret_cast<Claim*>(bytes.data_ptr());
  for (size_t i = 0; i < trained.size(); ++i) claims[i] = claim_of(trained[i]->tensor.grad());
  all_reduce(group, bytes, ReduceOp::max, "who has gradients").wait();
  for (size_t i = 0; i < trained.size(); ++i) {
    refuse_presence(claims[i].presence, trained[i]->name);
    if (claims[i].presence == kAbsent) continue;
    const auto highest = static_cast<at::ScalarType>(claims[i].highest_dtype);
    const auto lowest = static_cast<at::ScalarType>(Claim::kLast - claims[i].lowest_dtype);
    require<UsageError>(highest == lowest,
                        "all_reduce_grads: the gradient of '{}' is {} on a rank and {} on another, "
                        "allowed: one dtype",
                        trained[i]->name, at::toString(lowest), at::toString(highest));
    result.push_back({trained[i], highest});
  }
  return result;
}

Travelling prepare(const Reduced& reduced) {
  const at::Tensor& tensor = reduced.param->tensor;
  at::Tensor& grad = tensor.mutable_grad();
  if (!grad.defined()) grad = at::zeros_like(tensor, reduced.dtype);
  return {grad, grad.contiguous()};
}

/// Starts the reduction of gradients of one dtype, bucket by bucket.
void start(const ProcessGroup& group, ScalingFactor factor, const std::vector<Travelling>& list,
           std::vector<Work>& works) {
  const at::Tensor& example = list.front().sent;
  std::vector<LayoutParam> sizes;
  for (const Travelling& item : list) sizes.push_back({.numel = item.sent.numel()});
  const LayoutOptions options = {.bucket_limit = kBucketBytes / example.element_size()};
  const Reduction scaled(ReduceOp::sum, factor.numerator, factor.denominator);
  for (const ParamLayout::Bucket& bucket : compute_param_layout(sizes, options).buckets) {
    std::vector<at::Tensor> tensors;
    for (const int64_t index : bucket.params)
      tensors.push_back(list[static_cast<size_t>(index)].sent);
    works.push_back(all_reduce(group, tensors, scaled, "gradients"));
  }
}

/// Gradients that are reduced in the same way.
struct Route {
  std::vector<std::string> axes;
  DeviceMesh mesh;
  Trained params = {};
};

/// By ranks and factor: larger groups first, in an order that does not depend on any parameter
/// list.
using RouteKey = std::tuple<int64_t, RankList, int64_t>;

std::map<RouteKey, Route> routes_of(const MeshParameters& model) {
  std::map<RouteKey, Route> routes;
  for (const MeshParameter* param : trained_of(model)) {
    std::vector<std::string> axes = reduced_axes(*param);
    const DeviceMesh& mesh = param->dtensor->device_mesh();
    RankList ranks = mesh.layout().group(axes, mesh.parallel_state().rank());
    const auto size = static_cast<int64_t>(ranks.size());
    const int64_t divisor = mesh_scaling(*param, /*mean=*/true, size).denominator;
    if (size == 1 && divisor == 1) continue;
    routes.try_emplace({-size, std::move(ranks), divisor}, Route{std::move(axes), mesh})
        .first->second.params.push_back(param);
  }
  return routes;
}

/// Stages have different lists, so what several of them add, position by position, is compared
/// apart.
void check_same_on_stages(const Route& route, const ProcessGroup& group) {
  const std::string stages = to_string(MeshAxis::pp);
  if (std::find(route.axes.begin(), route.axes.end(), stages) == route.axes.end()) return;
  if (route.mesh.size(stages) == 1) return;
  std::vector<NamedParameter> params;
  for (const MeshParameter* param : route.params)
    params.push_back({param->name, param->tensor, param->description.value_or(ParamDescription{})});
  check_same_parameters(params, group);
}

/// Multiplies the gradients of `params` and adds them over `group`, whose ranks have the same list.
class GroupOfGrads {
 public:
  GroupOfGrads(const Trained& params, ProcessGroup group, ScalingFactor factor)
      : group_(std::move(group)), factor_(factor) {
    for (const Reduced& reduced : parameters_with_gradients(params, group_)) {
      Travelling item = prepare(reduced);
      by_dtype_[{item.sent.scalar_type(), item.sent.device().str()}].push_back(std::move(item));
    }
  }

  void start(std::vector<Work>& works) const {
    for (const auto& [key, list] : by_dtype_) lockstep::start(group_, factor_, list, works);
  }

  void copy_back() const {
    for (const auto& [key, list] : by_dtype_)
      for (const Travelling& item : list)
        if (!item.sent.is_same(item.grad)) item.grad.copy_(item.sent);
  }

 private:
  ProcessGroup group_;
  ScalingFactor factor_;
  std::map<std::pair<at::ScalarType, std::string>, std::vector<Travelling>> by_dtype_;
};

void reduce(const std::vector<GroupOfGrads>& groups) {
  std::vector<Work> works;
  for (const GroupOfGrads& grads : groups) grads.start(works);
  for (Work& work : works) work.wait();
  for (const GroupOfGrads& grads : groups) grads.copy_back();
}

/// Refuses parameters that need more than a mean over dp and cp.
void refuse_described(const MeshParameters& model, const ParallelState& state) {
  std::vector<NamedParameter> described;
  for (const MeshParameter& param : model)
    if (param.description) described.push_back({param.name, param.tensor, *param.description});
  require_dp_cp_averages(described, state.grids(), state.rank(), "all_reduce_grads");
}

void refuse_taken(const MeshParameters& model) {
  for (const MeshParameter& param : model)
    if (const GradientObserver* const observer = observer_of(param.tensor))
      fail<UsageError>(
          "all_reduce_grads: the gradient of '{}' is reduced by a {}, allowed: parameters of no "
          "other gradient API",
          param.name, observer->front());
}

}  // namespace

void all_reduce_grads(const MeshParameters& model, const DeviceMesh& world_mesh, bool use_ddp) {
  using Axes = std::vector<std::string>;
  const ParallelState& state = world_mesh.parallel_state();
  const ProcessGroup group = notify_on_error(state, [&] {
    for (const MeshParameter& param : model)
      refuse_unfinished(param.name, param.tensor, "all_reduce_grads");
    refuse_described(model, state);
    return world_mesh.get_group(use_ddp ? Axes{"cp"} : Axes{"dp", "cp"});
  });
  if (group.size() == 1) return notify_outside_on_error(group, state, [&] { model.check(); });
  const at::NoGradGuard no_grad;
  const Trained trained = trained_of(model);
  const ScalingFactor factor =
      scaling_factor(GradientScalingMode::average, group.size(), group.size());
  const auto grads = notify_outside_on_error(group, state, [&] {
    check_same_list(model, trained, group);
    return GroupOfGrads(trained, group, factor);
  });
  reduce({grads});
}

void all_reduce_grads(const torch::nn::Module& module, const ParallelState& state) {
  const at::NoGradGuard no_grad;
  const MeshParameters model = mesh_parameters(module, state);
  notify_on_error(state, [&] { refuse_taken(model); });
  const ProcessGroup stage = DeviceMesh::dense(state).get_group({"dp", "cp", "tp"});
  notify_outside_on_error(stage, state, [&] {
    check_same_parameters(collect_parameters(module), stage, {}, {},
                          {kCuttingAxes.begin(), kCuttingAxes.end()});
  });
  std::vector<GroupOfGrads> groups;
  for (const auto& [key, route] : routes_of(model)) {
    const ProcessGroup group = route.mesh.get_group(route.axes);
    const ScalingFactor factor = {1, std::get<2>(key)};
    groups.push_back(notify_outside_on_error(group, state, [&, &own = route] {
      check_same_on_stages(own, group);
      return GroupOfGrads(own.params, group, factor);
    }));
  }
  reduce(groups);
}

}  // namespace lockstep
