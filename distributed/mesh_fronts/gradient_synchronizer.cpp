#include "lockstep/distributed/gradient_synchronizer.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/grad_sync.h"
#include "lockstep/distributed/mesh_buffers.h"
#include "lockstep/distributed/mesh_reduction.h"
#include "lockstep/distributed/notify_on_error.h"
#include "lockstep/distributed/owned_grads.h"
#include "lockstep/distributed/parameter_check.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

using Phase = GradSyncState::Phase;

constexpr GradSyncCalls kCalls = {
    .front = "GradientSynchronizer",
    .count = "set_required_accumulations",
    .start = "wait",
    .finish = "wait",
    .complete = "wait()",
    .reset = "zero_grad",
    .allow_unused = "GradientSynchronizerOptions::allow_unused_parameters",
    .surplus = "state the backwards of a step with set_required_accumulations()",
    .reached_none = ""};

at::Tensor sum_of_tokens(const ProcessGroup& group, const at::Tensor& num_tokens) {
  at::Tensor tokens = num_tokens.detach().to(at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  tokens = tokens.reshape({});
  all_reduce(group, tokens, ReduceOp::sum, "num_tokens").wait();
  return tokens.clamp_min_(1);
}

}  // namespace

const char* to_string(GradientReduction reduction) {
  switch (reduction) {
    case GradientReduction::sum:
      return "sum";
    case GradientReduction::mean:
      return "mean";
    case GradientReduction::per_token:
      return "per-token";
  }
  return "";
}

struct GradientSynchronizer::Impl {
  std::vector<MeshParameters> param_groups;
  double bucket_size_mb;
  int64_t require_accumulations;
  GradientSynchronizerOptions options;
  std::map<const c10::TensorImpl*, std::string> names = {};
  bool bound = false;
  std::unique_ptr<GradSync> sync = {};  ///< null if all parameters are local
  std::vector<at::Tensor> local = {};
  std::vector<NamedParameter> frozen = {};  ///< when it was bound
  bool divided = false;                     ///< the gradients of this step by their tokens

  const ParallelState* job() const {
    for (const MeshParameters& group : param_groups)
      if (const ParallelState* const found = group.job()) return found;
    return nullptr;
  }

  void check() {
    for (const MeshParameters& group : param_groups) group.check();
    require<UsageError>(bucket_size_mb > 0, "bucket_size_mb: found {}, allowed: > 0",
                        bucket_size_mb);
    require<UsageError>(require_accumulations >= 1,
                        "require_accumulations: found {}, allowed: >= 1", require_accumulations);
    require<UsageError>(
        options.token_group.has_value() == (options.reduction == GradientReduction::per_token),
        "token_group: found {} with the reduction {}, allowed: one with per-token, and only there",
        options.token_group ? "one" : "none", to_string(options.reduction));
    for (size_t g = 0; g < param_groups.size(); ++g) {
      std::set<std::string_view> in_group;
      for (const MeshParameter& param : param_groups[g])
        require<UsageError>(in_group.insert(param.name).second,
                            "parameter group {}: two parameters are called '{}'; names must be "
                            "unique",
                            g, param.name);
    }
    for (const MeshParameters& group : param_groups)
      for (const MeshParameter& param : group) {
        const auto [entry, is_new] = names.emplace(param.tensor.unsafeGetTensorImpl(), param.name);
        refuse_described_without_mesh(param, "GradientSynchronizer");
        require<UsageError>(is_new, "parameter '{}' is in two parameter groups, once as '{}'",
                            param.name, entry->second);
      }
  }

  void require_bound(const char* call) const {
    require<UsageError>(bound, "{}: the state is unbound; call bind() first", call);
  }

  /// Adds the trained parameters that have axes to `candidates`. `only_compared`: those with
  /// complete axes, over all ranks that hold them.
  void collect(std::vector<MeshBufferCandidate>& candidates, bool only_compared) {
    for (size_t g = 0; g < param_groups.size(); ++g)
      for (size_t i = 0; i < param_groups[g].size(); ++i) {
        const MeshParameter& param = param_groups[g][i];
        if (!param.tensor.requires_grad()) continue;
        if (only_compared && param.complete_axes.empty()) continue;
        refuse_untrainable(param.name, param.tensor);
        std::vector<std::string> axes = reduced_axes(param);
        if (only_compared) axes = axes_of(param).replicated;
        if (axes.empty()) {
          local.push_back(param.tensor);
          continue;
        }
        const DeviceMesh& mesh = param.dtensor->device_mesh();
        RankList ranks = mesh.layout().group(axes, mesh.parallel_state().rank());
        const ScalingFactor factor = scaling_of(param, ranks);
        const MeshBufferKey key = {g, param.tensor.device(), mesh_grad_dtype(param),
                                   std::move(ranks), factor};
        auto at =
            std::find_if(candidates.begin(), candidates.end(), [&](const MeshBufferCandidate& c) {
              return c.key == key && c.only_compared == only_compared;
            });
        if (at == candidates.end())
          at = candidates.insert(at, {key, only_compared, mesh, std::move(axes)});
        at->params.push_back({param.name, param.tensor, {}});
        at->descriptions.push_back(param.description.value_or(ParamDescription{}));
        at->positions.push_back(expected_position(i, param_groups[g].size()));
        if (only_compared) at->complete += complete_text(param);
      }
  }

  ScalingFactor scaling_of(const MeshParameter& param, const RankList& ranks) const {
    return mesh_scaling(param, options.reduction == GradientReduction::mean,
                        static_cast<int64_t>(ranks.size()));
  }

  BufferPlan plan_for(const MeshBufferCandidate& candidate, const ProcessGroup& group) const {
    return {.params = candidate.params,
            .positions = candidate.positions,
            .grad_dtype = candidate.key.grad_dtype,
            .reduction = {.group = group, .factor = candidate.key.factor},
            .layout = {.bucket_limit = bucket_limit(bucket_size_mb, candidate.key.grad_dtype)},
            .contents = BufferContents::grads};
  }

  /// The settings on which the ranks that share the parameters of a buffer must agree.
  std::vector<ConfigValue> settings_of(const MeshBufferCandidate& candidate) const {
    return {{"complete_axes", candidate.complete.empty() ? "none" : candidate.complete},
            {"reduction", to_string(options.reduction)},
            {"bucket_size_mb", fmt::format("{}", bucket_size_mb)},
            {"require_accumulations", fmt::format("{}", require_accumulations)},
            {"allow_unused_parameters", fmt::format("{}", options.allow_unused_parameters)},
            {"dtype of gradients", at::toString(candidate.key.grad_dtype)}};
  }

  void compare(const MeshBufferCandidate& candidate, const ProcessGroup& group) const {
    std::vector<NamedParameter> described = candidate.params;
    for (size_t i = 0; i < described.size(); ++i)
      described[i].description = candidate.descriptions[i];
    notify_outside_on_error(group, candidate.mesh.parallel_state(), [&] {
      check_same_parameters(described, group, settings_of(candidate), [&] {
        for (const NamedParameter& param : candidate.params) refuse_hooked(param);
      });
    });
  }

  void bind() {
    for (const MeshParameters& group : param_groups) check_same_described(group);
    for (const MeshParameters& group : param_groups)
      for (const MeshParameter& param : group)
        if (!param.tensor.requires_grad()) frozen.push_back({param.name, param.tensor, {}});
    auto candidates = notify_on_error(job(), [this] {
      std::vector<MeshBufferCandidate> found;
      for (const bool only_compared : {true, false}) collect(found, only_compared);
      return found;
    });
    for (MeshBufferCandidate* const candidate : in_order(candidates)) {
      const ProcessGroup group = candidate->mesh.get_group(candidate->axes);
      compare(*candidate, group);
      if (candidate->only_compared) continue;
      candidate->plan = plan_for(*candidate, group);
      agree_on_positions(*candidate->plan);
    }
    std::vector<BufferPlan> plans;
    for (MeshBufferCandidate& candidate : candidates)
      if (candidate.plan) plans.push_back(std::move(*candidate.plan));
    if (!plans.empty()) {
      sync = std::make_unique<GradSync>(make_bucketing(plans, /*overlap=*/true, /*checks=*/{}),
                                        plans.front().reduction.group, /*overlap=*/true,
                                        options.allow_unused_parameters, kCalls);
      sync->state().set_microbatches(require_accumulations);
    }
    bound = true;
  }

  void finish() {
    require_bound("wait");
    notify_on_error(job(), [&] { refuse_unfrozen(frozen); });
    if (!sync) return;
    sync->state().refuse_early_finish();
    sync->finish();
  }

  void unbind() {
    sync.reset();
    local.clear();
    frozen.clear();
    divided = false;
    bound = false;
  }

  std::vector<at::Tensor> bound_parameters() const {
    std::vector<at::Tensor> result = local;
    if (!sync) return result;
    for (const Bucketing::Place& place : sync->bucketing().places)
      result.push_back(place.buffer->params()[place.index].tensor);
    return result;
  }

  void divide(const at::Tensor& tokens) {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> grads;
    if (sync)
      for (const auto& buffer : sync->bucketing().buffers) grads.push_back(buffer->grad_data());
    for (const at::Tensor& param : local)
      if (param.grad().defined()) grads.push_back(param.grad());
    divide_grads(grads, tokens);
    divided = true;
  }

  void reset_local() {
    divided = false;
    for (const at::Tensor& param : local) param.mutable_grad().reset();
  }

  /// `axis`: one that is reduced over.
  Placement placement_now(const MeshParameter& param, const std::string& axis) const {
    if (sync && sync->state().phase() == Phase::ready) return Replicate{};
    return placement_of_terms(param, axis, options.reduction == GradientReduction::mean);
  }
};

GradientSynchronizer::GradientSynchronizer(std::vector<MeshParameters> param_groups,
                                           double bucket_size_mb, int64_t require_accumulations,
                                           GradientSynchronizerOptions options)
    : impl_(new Impl{std::move(param_groups), bucket_size_mb, require_accumulations,
                     std::move(options)}) {
  notify_on_error(impl_->job(), [&] { impl_->check(); });
}

GradientSynchronizer::GradientSynchronizer(const torch::nn::Module& module,
                                           const ParallelState& state, double bucket_size_mb,
                                           int64_t require_accumulations,
                                           GradientSynchronizerOptions options)
    : GradientSynchronizer({mesh_parameters(module, state)}, bucket_size_mb, require_accumulations,
                           std::move(options)) {}

GradientSynchronizer::~GradientSynchronizer() = default;

void GradientSynchronizer::bind() {
  require<UsageError>(!impl_->bound, "bind: the state is {}; call unbind() first", state_text());
  try {
    impl_->bind();
  } catch (...) {
    impl_->unbind();
    throw;
  }
}

void GradientSynchronizer::unbind() {
  if (!impl_->bound) return;
  if (impl_->sync) impl_->sync->settle();
  const std::vector<at::Tensor> bound = impl_->bound_parameters();
  impl_->unbind();
  for (const at::Tensor& tensor : bound) tensor.mutable_grad().reset();
}

void GradientSynchronizer::wait() {
  if (impl_->options.token_group)
    notify_on_error(*impl_->options.token_group, [] {
      fail<UsageError>("wait: num_tokens is missing; the reduction is per-token");
    });
  impl_->finish();
}

void GradientSynchronizer::wait(const at::Tensor& num_tokens) {
  const std::optional<ProcessGroup>& token_group = impl_->options.token_group;
  notify_on_error(impl_->job(), [&] {
    require<UsageError>(token_group.has_value(),
                        "wait: num_tokens was given, but the reduction is {}; allowed: per-token",
                        to_string(impl_->options.reduction));
  });
  notify_on_error(*token_group, [&] { check_token_count(num_tokens, "wait"); });
  impl_->finish();
  notify_on_error(*token_group, [&] {
    require<UsageError>(!impl_->divided,
                        "wait: the gradients of this step are divided by their tokens already; "
                        "call zero_grad() between steps");
    impl_->divide(sum_of_tokens(*token_group, num_tokens));
  });
}

void GradientSynchronizer::zero_grad() {
  impl_->require_bound("zero_grad");
  if (impl_->sync) impl_->sync->zero_grad();
  impl_->reset_local();
}

void GradientSynchronizer::abandon_step() {
  impl_->require_bound("abandon_step");
  if (impl_->sync) impl_->sync->abandon();
  impl_->reset_local();
}

void GradientSynchronizer::set_required_accumulations(int64_t count) {
  require<UsageError>(count >= 1, "{}: found {}, allowed: >= 1", kCalls.count, count);
  if (impl_->sync) impl_->sync->state().set_microbatches(count);
  impl_->require_accumulations = count;
}

DTensor GradientSynchronizer::grad(const MeshParameter& parameter) const {
  require<UsageError>(impl_->names.contains(parameter.tensor.unsafeGetTensorImpl()) &&
                          parameter.dtensor && parameter.tensor.grad().defined(),
                      "grad: '{}' is not a DTensor parameter of this synchronizer that has a "
                      "gradient",
                      parameter.name);
  const DeviceMesh& mesh = parameter.dtensor->device_mesh();
  std::vector<Placement> placements = parameter.dtensor->placements();
  for (const std::string& axis : reduced_axes(parameter))
    placements[mesh.layout().index_of(axis)] = impl_->placement_now(parameter, axis);
  return DTensor::from_local(parameter.tensor.grad(), mesh, std::move(placements),
                             parameter.dtensor->shape());
}

std::string GradientSynchronizer::state_text() const {
  if (!impl_->bound) return "unbound";
  return impl_->sync ? impl_->sync->state().phase_text() : "local";
}

std::vector<BucketInfo> GradientSynchronizer::buckets() const {
  return impl_->sync ? impl_->sync->buckets() : std::vector<BucketInfo>();
}

std::string GradientSynchronizer::describe() const {
  return fmt::format("{} reduction, {} backwards a step, state {}\n{}{} local parameters\n",
                     to_string(impl_->options.reduction), impl_->require_accumulations,
                     state_text(), to_string(buckets()), impl_->local.size());
}

}  // namespace lockstep
