#include "lockstep/parallel_state/parallel_functions.h"

#include <functional>
#include <string>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/parallel_state/collective_call.h"
#include "lockstep/parallel_state/redistribute.h"
#include "lockstep/parallel_state/row_exchange.h"

namespace lockstep {
namespace {

using Label = std::string;
using Kind = CollectiveOperation::Kind;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// One direction of a function; empty if it does nothing.
using Map = std::function<at::Tensor(const at::Tensor&, const ProcessGroup&, const Label&)>;

at::Tensor run(const Map& map, const at::Tensor& x, const ProcessGroup& group, const Label& label) {
  // A collective that holds on to its tensors must not hold the graph, which holds the group.
  return map ? map(x.detach(), group, label) : x;
}

/// The data that backward needs.
struct Backward : torch::CustomClassHolder {
  Backward(Map m, ProcessGroup g, SharedLabel l)
      : map(std::move(m)), group(std::move(g)), label(std::move(l)) {}
  Map map;
  ProcessGroup group;
  SharedLabel label;
};

struct ParallelFunction : torch::autograd::Function<ParallelFunction> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Map& forward,
                            const Map& backward, const ProcessGroup& group,
                            const SharedLabel& label) {
    context->saved_data["backward"] = c10::IValue::make_capsule(
        c10::make_intrusive<Backward>(backward, group, share_label(group, "gradient of ", *label)));
    const at::Tensor result = run(forward, x, group, *label);
    return result.is_same(x) ? result : result.detach();
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const auto capsule = context->saved_data["backward"].toCapsule();
    const auto& saved = static_cast<const Backward&>(*capsule);
    require<UsageError>(!at::GradMode::is_enabled(),
                        "{} over group {}: found backward with create_graph, allowed: without; "
                        "there is no second derivative",
                        *saved.label, saved.group.to_string());
    return {run(saved.map, grads[0], saved.group, *saved.label), {}, {}, {}, {}};
  }
};

at::Tensor apply(const at::Tensor& x, const ProcessGroup& group, std::string_view label,
                 const Map& forward, const Map& backward) {
  if (group.size() == 1) return x;
  const SharedLabel name = share_label(group, "", label);
  if (!at::GradMode::is_enabled() || !x.requires_grad()) return run(forward, x, group, *name);
  return ParallelFunction::apply(x, forward, backward, group, name);
}

at::Tensor reduce(const at::Tensor& x, const ProcessGroup& group, const Label& label) {
  return change_placement(x, Partial{}, Replicate{}, 0, group, label);
}

Map split(int64_t dim) {
  return [dim](const at::Tensor& x, const ProcessGroup& group, const Label& /*label*/) {
    return cut_chunk(x, dim, group.size(), group.rank());
  };
}

Map gather(int64_t dim) {
  return [dim](const at::Tensor& x, const ProcessGroup& group, const Label& label) {
    return change_placement(x, Shard{dim}, Replicate{}, x.size(dim) * group.size(), group, label);
  };
}

Map reduce_and_split(int64_t dim, ReduceOp op) {
  return [=](const at::Tensor& x, const ProcessGroup& group, const Label& label) {
    return change_placement(x, Partial{op}, Shard{dim}, 0, group, label);
  };
}

Map exchange_dims(int64_t split_dim, int64_t gather_dim) {
  return [=](const at::Tensor& x, const ProcessGroup& group, const Label& label) {
    return change_placement(x, Shard{gather_dim}, Shard{split_dim},
                            x.size(gather_dim) * group.size(), group, label);
  };
}

Map backward_of_gather(int64_t dim, GradientState gradient) {
  if (gradient == GradientState::complete) return split(dim);
  const bool mean = gradient == GradientState::partial_mean;
  return reduce_and_split(dim, mean ? ReduceOp::average : ReduceOp::sum);
}

/// Checks `dim`; returns it counted from the start.
int64_t checked_dim(const CollectiveCall& call, const at::Tensor& x, int64_t dim) {
  call.check(dim >= -x.dim() && dim < x.dim(), "found dimension {} of {}, allowed: {} to {}", dim,
             x.sizes(), -x.dim(), x.dim() - 1);
  return dim < 0 ? dim + x.dim() : dim;
}

int64_t divided_dim(const CollectiveCall& call, const at::Tensor& x, int64_t dim, int64_t ranks) {
  const int64_t result = checked_dim(call, x, dim);
  call.check(x.size(result) % ranks == 0, "dimension {} has size {}, allowed: a multiple of {}",
             dim, x.size(result), ranks);
  return result;
}

}  // namespace

at::Tensor copy_to_group(const at::Tensor& x, const ProcessGroup& group, std::string_view label) {
  return apply(x, group, label, Map(), reduce);
}

at::Tensor reduce_from_group(const at::Tensor& x, const ProcessGroup& group,
                             std::string_view label) {
  return apply(x, group, label, reduce, Map());
}

at::Tensor scatter_to_group(const at::Tensor& x, const ProcessGroup& group, int64_t dim,
                            std::string_view label) {
  const CollectiveCall call(group, {Kind::scatter_to_group}, label);
  dim = divided_dim(call, x, dim, group.size());
  return apply(x, group, label, split(dim), gather(dim));
}

at::Tensor gather_from_group(const at::Tensor& x, const ProcessGroup& group, int64_t dim,
                             GradientState gradient, std::string_view label) {
  dim = checked_dim({group, {Kind::gather_from_group}, label}, x, dim);
  return apply(x, group, label, gather(dim), backward_of_gather(dim, gradient));
}

at::Tensor reduce_scatter_to_group(const at::Tensor& x, const ProcessGroup& group, int64_t dim,
                                   std::string_view label) {
  const CollectiveCall call(group, {Kind::reduce_scatter_to_group}, label);
  dim = divided_dim(call, x, dim, group.size());
  return apply(x, group, label, reduce_and_split(dim, ReduceOp::sum), gather(dim));
}

at::Tensor all_to_all_rows(const at::Tensor& x, const ProcessGroup& group,
                           const std::vector<int64_t>& output_rows,
                           const std::vector<int64_t>& input_rows, std::string_view label) {
  return RowExchange(x, group, output_rows, input_rows, label).wait();
}

at::Tensor all_to_all_dims(const at::Tensor& x, const ProcessGroup& group, int64_t split_dim,
                           int64_t gather_dim, std::string_view label) {
  const CollectiveCall call(group, {Kind::all_to_all_dims}, label);
  split_dim = divided_dim(call, x, split_dim, group.size());
  gather_dim = checked_dim(call, x, gather_dim);
  call.check(split_dim != gather_dim, "found dimension {} for both, allowed: two dimensions",
             split_dim);
  return apply(x, group, label, exchange_dims(split_dim, gather_dim),
               exchange_dims(gather_dim, split_dim));
}

}  // namespace lockstep
