#include "lockstep/distributed/reducer.h"

#include <algorithm>
#include <set>

#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/broadcast_values.h"
#include "lockstep/distributed/description_check.h"
#include "lockstep/distributed/model_check.h"
#include "lockstep/distributed/module_buffers.h"
#include "lockstep/distributed/parameter_check.h"
#include "lockstep/distributed/reducer_assignment.h"
#include "lockstep/distributed/reducer_impl.h"
#include "lockstep/parallel_state/axis_groups.h"

namespace lockstep {
namespace {

/// All options. Fails to compile if ReducerOptions gets another number of them.
std::vector<ConfigValue> settings_of(const ReducerOptions& options) {
  const auto& [caps, initial_caps, indices, rebuild, find_unused, skip_unused, is_static, as_view,
               sparse, reduce_dtype, check_for_nan, broadcasts] = options;
  const auto text = [](const auto& value) { return fmt::format("{}", value); };
  const auto list = [](const auto& values) { return fmt::format("[{}]", fmt::join(values, ", ")); };
  return {{"bucket_bytes_caps", list(caps)},
          {"initial_bucket_bytes_caps", list(initial_caps)},
          {"bucket_indices", text(indices)},
          {"rebuild_buckets", text(rebuild)},
          {"find_unused_parameters", text(find_unused)},
          {"skip_all_reduce_unused_params", text(skip_unused)},
          {"static_graph", text(is_static)},
          {"gradient_as_bucket_view", text(as_view)},
          {"sparse_parameters", list(sparse)},
          {"reduce_dtype", reduce_dtype ? at::toString(*reduce_dtype) : "none"},
          {"check_for_nan_in_grad", text(check_for_nan)},
          {"broadcast_parameters", text(broadcasts)}};
}

void check_options(const ReducerOptions& o) {
  const auto positive = [](const std::vector<int64_t>& caps) {
    return std::all_of(caps.begin(), caps.end(), [](int64_t cap) { return cap >= 1; });
  };
  require<ConfigError>(!o.bucket_bytes_caps.empty() && positive(o.bucket_bytes_caps) &&
                           positive(o.initial_bucket_bytes_caps),
                       "Reducer: bucket_bytes_caps: found [{}] and [{}], allowed: one or more "
                       "numbers >= 1",
                       fmt::join(o.bucket_bytes_caps, ", "),
                       fmt::join(o.initial_bucket_bytes_caps, ", "));
  require<ConfigError>(
      !o.skip_all_reduce_unused_params || (o.find_unused_parameters && !o.static_graph),
      "Reducer: skip_all_reduce_unused_params: found true, which needs "
      "find_unused_parameters = true and static_graph = false");
  require<ConfigError>(!o.reduce_dtype || at::isFloatingType(*o.reduce_dtype),
                       "Reducer: reduce_dtype: found {}, allowed: a floating-point type",
                       o.reduce_dtype ? at::toString(*o.reduce_dtype) : "none");
}

std::vector<NamedParameter> trained(const std::vector<NamedParameter>& parameters) {
  std::vector<NamedParameter> result;
  for (const NamedParameter& param : parameters)
    if (param.tensor.requires_grad()) result.push_back(param);
  require<UsageError>(!result.empty(), "Reducer: none of the {} parameters requires a gradient",
                      parameters.size());
  return result;
}

std::vector<bool> sparse_flags(const std::vector<NamedParameter>& params,
                               const std::vector<std::string>& names) {
  std::vector<bool> flags(params.size(), false);
  for (const std::string& name : names) {
    const auto found = std::find_if(params.begin(), params.end(),
                                    [&](const NamedParameter& p) { return p.name == name; });
    require<ConfigError>(found != params.end(),
                         "Reducer: sparse_parameters: found '{}', allowed: names of trained "
                         "parameters",
                         name);
    require<ConfigError>(found->tensor.device().is_cpu(),
                         "Reducer: sparse_parameters: '{}' is on {}; NCCL does not reduce sparse "
                         "gradients, allowed: parameters on the CPU, or dense gradients (an "
                         "embedding with sparse = false)",
                         name, found->tensor.device().str());
    flags[static_cast<size_t>(found - params.begin())] = true;
  }
  return flags;
}

/// The trained ones among the parameters that the ranks have agreed on.
std::vector<NamedParameter> agreed(const std::vector<NamedParameter>& parameters,
                                   const std::vector<NamedParameter>& buffers,
                                   const ReducerOptions& options, const ProcessGroup& group,
                                   const DescriptionChecks& description_checks) {
  const auto own_checks = [&] {
    check_parameter_list(parameters, "Reducer");
    check_options(options);
    if (description_checks) description_checks(parameters);
    (void)sparse_flags(trained(parameters), options.sparse_parameters);
  };
  check_same_parameters(parameters, group, settings_of(options), own_checks, {}, buffers);
  return trained(parameters);
}

/// Without the experts, and their buffers, of which other ranks of dp-cp have none.
std::vector<NamedParameter> shared_over_dp_cp(std::vector<NamedParameter> tensors,
                                              const ParallelState& state) {
  const auto ranks = [&](GroupKind kind) { return state.grids().group_of(kind, state.rank()); };
  std::erase_if(tensors, [&](const NamedParameter& tensor) {
    return ranks(replicas(tensor.description)) != ranks(GroupKind::dp_cp);
  });
  return tensors;
}

/// The weights of embeddings with sparse gradients. A module may hold one of them several times.
std::set<const c10::TensorImpl*> sparse_weights(const torch::nn::Module& module) {
  std::set<const c10::TensorImpl*> weights;
  const auto look_at = [&](const torch::nn::Module& candidate) {
    const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(&candidate);
    const auto* bag = dynamic_cast<const torch::nn::EmbeddingBagImpl*>(&candidate);
    if (embedding && embedding->options.sparse())
      weights.insert(embedding->weight.unsafeGetTensorImpl());
    if (bag && bag->options.sparse()) weights.insert(bag->weight.unsafeGetTensorImpl());
  };
  look_at(module);
  for (const auto& child : module.modules(/*include_self=*/false)) look_at(*child);
  return weights;
}

ReducerOptions with_sparse_embeddings(ReducerOptions options, const torch::nn::Module& module) {
  std::vector<std::string>& names = options.sparse_parameters;
  const auto weights = sparse_weights(module);
  for (const NamedParameter& param : collect_parameters(module))
    if (param.tensor.requires_grad() && weights.contains(param.tensor.unsafeGetTensorImpl()) &&
        std::find(names.begin(), names.end(), param.name) == names.end())
      names.push_back(param.name);
  return options;
}

}  // namespace

Reducer::Impl::Impl(std::vector<NamedParameter> parameters,
                    std::vector<NamedParameter> module_buffers, const ProcessGroup& process_group,
                    const ReducerOptions& reducer_options,
                    const DescriptionChecks& description_checks)
    : options(reducer_options),
      group(process_group),
      guard(group),
      untrained(std::move(module_buffers)),
      params(agreed(parameters, untrained, options, group, description_checks)),
      sparse(sparse_flags(params, reducer_options.sparse_parameters)),
      divisor(process_group.size()) {
  for (const NamedParameter& param : parameters)
    if (!param.tensor.requires_grad()) frozen.push_back(param);
  untrained.insert(untrained.end(), frozen.begin(), frozen.end());
  if (options.find_unused_parameters || options.static_graph)
    usage = std::make_unique<ParameterUsage>(params, group);
  if (options.static_graph) fired.assign(params.size(), 0);
  if (options.bucket_indices.empty()) {
    std::vector<at::Tensor> tensors;
    for (const NamedParameter& param : params) tensors.push_back(param.tensor);
    auto caps = options.initial_bucket_bytes_caps;
    if (caps.empty()) caps = options.bucket_bytes_caps;
    auto buckets_by_size =
        compute_bucket_assignment_by_size(tensors, caps, sparse, {}, options.reduce_dtype).buckets;
    std::reverse(buckets_by_size.begin(), buckets_by_size.end());
    build_buckets(std::move(buckets_by_size));
  } else {
    build_buckets(options.bucket_indices);
  }
}

void Reducer::Impl::build_buckets(std::vector<std::vector<size_t>> new_indices) {
  check_bucket_indices(new_indices, params, sparse);
  const ReducerBucket::Settings settings = {
      .group = group,
      .gradient_as_bucket_view = options.gradient_as_bucket_view,
      .check_for_nan = options.check_for_nan_in_grad,
      .reduce_dtype = options.reduce_dtype};
  std::vector<GradSyncState::Param> counted(params.size());
  std::vector<std::unique_ptr<ReducerBucket>> new_buckets;
  hooks.clear();
  places.assign(params.size(), {});
  for (size_t b = 0; b < new_indices.size(); ++b) {
    std::vector<NamedParameter> members;
    for (const size_t p : new_indices[b]) members.push_back(params[p]);
    new_buckets.push_back(std::make_unique<ReducerBucket>(std::move(members),
                                                          sparse[new_indices[b].front()], settings,
                                                          b, b + 1 == new_indices.size()));
    for (size_t i = 0; i < new_indices[b].size(); ++i) {
      const size_t p = new_indices[b][i];
      places[p] = {new_buckets.back().get(), i};
      counted[p] = {params[p].name, static_cast<int64_t>(b)};
      if (!buckets.empty()) new_buckets.back()->move_in(i);
    }
  }
  indices = std::move(new_indices);
  buckets = std::move(new_buckets);
  sync = std::make_unique<GradSyncState>(std::move(counted), static_cast<int64_t>(buckets.size()),
                                         /*overlap=*/true, /*allow_unused=*/true);
  for (size_t p = 0; p < params.size(); ++p)
    hooks.emplace_back(params[p].tensor, places[p].bucket->expected_grad(places[p].index), *this,
                       static_cast<int64_t>(p));
}

Reducer::Reducer(const torch::nn::Module& module, const ProcessGroup& group, ReducerOptions options)
    : impl_(std::make_unique<Impl>(collect_parameters(module),
                                   collect_buffers(module, collect_parameters(module)), group,
                                   with_sparse_embeddings(std::move(options), module),
                                   [](const std::vector<NamedParameter>& params) {
                                     require_no_model_axes(params, "Reducer");
                                   })) {
  if (impl_->options.broadcast_parameters) broadcast_parameters();
}

Reducer::Reducer(const torch::nn::Module& module, const ParallelState& state,
                 ReducerOptions options)
    : impl_(std::make_unique<Impl>(
          collect_parameters(module),
          shared_over_dp_cp(collect_buffers(module, collect_parameters(module)), state),
          state.group(GroupKind::dp_cp), with_sparse_embeddings(std::move(options), module),
          [&](const std::vector<NamedParameter>& params) {
            refuse_other_cuts(params, state.grids(), "Reducer");
            require_dp_cp_averages(params, state.grids(), state.rank(), "Reducer");
          })) {
  impl_->untrained = shared_over_dp_cp(std::move(impl_->untrained), state);
  check_same_trained(collect_parameters(module), state);
  if (impl_->options.broadcast_parameters) broadcast_parameters();
}

Reducer::Reducer(std::vector<NamedParameter> parameters, const ProcessGroup& group,
                 const ReducerOptions& options)
    : impl_(std::make_unique<Impl>(std::move(parameters), std::vector<NamedParameter>(), group,
                                   options, nullptr)) {
  if (impl_->options.broadcast_parameters) broadcast_parameters();
}

Reducer::~Reducer() = default;

void Reducer::prepare_for_forward() { impl_->prepare_for_forward(); }

void Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs) {
  impl_->prepare_for_backward(outputs);
}

void Reducer::finalize_backward() {
  impl_->guarded([&] {
    impl_->refuse_open();
    impl_->refuse_without_gradients();
  });
}

NoSyncGuard Reducer::no_sync() { return impl_->no_sync.enter(); }

void Reducer::zero_grad_buffer() {
  require<UsageError>(!impl_->armed, "zero_grad_buffer: an iteration is open: {}",
                      impl_->missing_text());
  for (const auto& bucket : impl_->buckets) bucket->zero_grad();
}

void Reducer::register_comm_hook(std::shared_ptr<CommHook> hook) {
  require<UsageError>(!impl_->hook, "register_comm_hook: can only be called once; '{}' is there",
                      impl_->hook ? impl_->hook->name() : "");
  require<UsageError>(!impl_->armed, "register_comm_hook: an iteration is open");
  impl_->guarded([&] {
    require<UsageError>(hook != nullptr, "register_comm_hook: found no hook");
    impl_->hook = std::move(hook);
    if (impl_->hooks_compared) impl_->compare_hooks();
  });
}

void Reducer::set_sparse_metadata(std::map<std::string, at::Tensor> rows) {
  require<UsageError>(!impl_->joining, "set_sparse_metadata: inside join()");
  for (const auto& [name, tensor] : rows) {
    require<UsageError>(tensor.defined(), "set_sparse_metadata: the rows of '{}' are undefined",
                        name);
    const auto& names = impl_->options.sparse_parameters;
    require<UsageError>(std::find(names.begin(), names.end(), name) != names.end(),
                        "set_sparse_metadata: found '{}', allowed: one of sparse_parameters", name);
    require<UsageError>(tensor.dim() == 1 && tensor.scalar_type() == at::kLong,
                        "set_sparse_metadata: '{}': found rows of {} dimensions of {}, allowed: 1 "
                        "dimension of Long",
                        name, tensor.dim(), at::toString(tensor.scalar_type()));
  }
  impl_->sparse_rows = std::move(rows);
}

void Reducer::join(const std::function<void()>& iterations, const ReducerJoinOptions& options) {
  require<UsageError>(!impl_->joining, "join: inside join() already");
  impl_->joining = Impl::Joining{.options = options};
  broadcast_parameters(impl_->join(iterations));
}

void Reducer::broadcast_parameters(int64_t source) {
  const at::NoGradGuard no_grad;
  for (const auto& bucket : impl_->buckets) {
    std::vector<at::Tensor> tensors;
    for (const NamedParameter& param : bucket->params()) tensors.push_back(param.tensor);
    broadcast_values(impl_->group, tensors, source, "parameters");
  }
  for (const NamedParameter& untrained : impl_->untrained)
    broadcast_values(impl_->group, {untrained.tensor}, source, kUntrainedLabel);
}

const std::vector<std::vector<size_t>>& Reducer::bucket_indices() const { return impl_->indices; }

bool Reducer::has_rebuilt_buckets() const { return impl_->rebuilt; }

const std::vector<int32_t>& Reducer::used_counts() const {
  require<UsageError>(impl_->tracks_usage(),
                      "used_counts: needs find_unused_parameters or static_graph");
  return impl_->usage->counts();
}

bool Reducer::ddp_graph_static() const { return !impl_->unused_changed; }

void Reducer::set_ddp_runtime_logging_sample_rate(int64_t rate) {
  require<ConfigError>(rate >= 1, "set_ddp_runtime_logging_sample_rate: found {}, allowed: >= 1",
                       rate);
  impl_->statistics.set_sample_rate(rate);
}

const std::vector<int64_t>& Reducer::get_backward_stats() const {
  return impl_->statistics.ready();
}

}  // namespace lockstep
