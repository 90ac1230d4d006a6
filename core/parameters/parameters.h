#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include "lockstep/core/param_spec.h"
#include "lockstep/core/placement.h"

namespace lockstep {

/// What a rank needs, besides a specification, to create its piece of a parameter. The default is
/// one process that holds the whole parameter.
struct ParamOrigin {
  at::TensorOptions options = {};  ///< dtype and device
  uint64_t seed = 1234;            ///< of the initial values
  std::string name = {};  ///< global name of the module that is being built, ends in "." or empty
  MeshPlace place = {};   ///< of this rank
  /// Whether there are several tp ranks and each has only its part of the tokens outside the
  /// tensor-parallel regions.
  bool splits_sequence = false;
  /// False: zeros instead of random initial values, for a model whose weights are loaded. Constant
  /// initial values are set in either case.
  bool perform_initialization = true;

  /// The origin of a child that is registered under `child_name`.
  ParamOrigin child(const std::string& child_name) const {
    ParamOrigin origin = *this;
    origin.name += child_name + ".";
    return origin;
  }
};

/// The number of ranks of each axis that cuts a parameter.
using AxisSizes = std::map<MeshAxis, int64_t>;

/// Descriptions of the parameters below a module, by their dotted names relative to it: "weight",
/// "0.bias".
using ParamDescriptions = std::map<std::string, ParamDescription>;

/// Base of layers that describe their parameters. A layer registers each parameter together with
/// its description, preferably with add(), from the specification that the planner also reads. For
/// a child without descriptions, such as a torch::nn module, use register_described_module().
/// Parameters without a description get default_description(), see collect_parameters().
class DescribedModule : public torch::nn::Module {
 public:
  using torch::nn::Module::Module;

  /// The description of the parameter that this module registered under `name`, or that a child has
  /// under this dotted name; nullptr if this module described none.
  const ParamDescription* description(const std::string& name) const;

  /// By how many ranks add() cut the parameter that this module registered under `name`; unset if
  /// add() did not make it.
  std::optional<AxisSizes> cut_by(const std::string& name) const;

  /// Whether one of its parameters was created for tp ranks that each have only a part of the
  /// tokens.
  bool splits_sequence() const { return splits_sequence_; }

 protected:
  /// Creates this rank's piece of `spec`, fills it with its initial values (the key is origin.name
  /// + spec.name) and registers it under spec.name. UsageError, with the global name: a dimension
  /// below 1, too many elements, a standard deviation that is not finite or is negative,
  /// unpadded_rows outside 1 to the number of rows; and the errors of local_piece() and
  /// ParamDescription::validate().
  at::Tensor add(const ParamSpec& spec, const ParamOrigin& origin);

  /// Creates and registers the child that `spec` lists under `name`: Child(context.child(name),
  /// spec.child(name), more...). `context` is a ParamOrigin, a ParallelContext, a LayerContext or
  /// another type with child(). The key of the initial values and the path of the module in a
  /// checkpoint follow from this one name. If you make a child yourself, for register_module() or a
  /// ModuleList, also pass context.child(name): two children of one context would start from the
  /// same random values.
  template <class Child, class Context, class... More>
  std::shared_ptr<Child> add_child(const Context& context, const ModuleSpec& spec,
                                   const std::string& name, More&&... more) {
    return register_module(name, std::make_shared<Child>(context.child(name), spec.child(name),
                                                         std::forward<More>(more)...));
  }

  /// The same for a child that is constructed from sizes: Child(context.child(name), sizes...).
  template <class Child, class Context, class... Sizes>
  std::shared_ptr<Child> add_child(const Context& context, const std::string& name,
                                   Sizes&&... sizes) {
    return register_module(
        name, std::make_shared<Child>(context.child(name), std::forward<Sizes>(sizes)...));
  }

  /// The same for a child whose class `make` chooses: make(context.child(name), spec.child(name)).
  template <class Context, class Make>
  auto add_child_by(const Make& make, const Context& context, const ModuleSpec& spec,
                    const std::string& name) {
    return register_module(name, make(context.child(name), spec.child(name)));
  }

  /// torch::nn::Module::register_parameter plus a description. UsageError if the description
  /// contradicts itself (see ParamDescription::validate).
  at::Tensor& register_described_parameter(const std::string& name, at::Tensor tensor,
                                           ParamDescription description);

  /// torch::nn::Module::register_module for a `child` (shared pointer or holder) that does not
  /// describe its parameters. All parameters that it has now, including those of its children, get
  /// default_description(), with `over_tp` as the state of their gradients over tp after backward.
  /// Between the tensor-parallel regions pass ParallelContext::replicated_gradient_state():
  ///
  ///     norm_ = register_described_module("norm", torch::nn::LayerNorm(options),
  ///                                       context.replicated_gradient_state());
  template <class Child>
  auto register_described_module(const std::string& name, Child child, GradientState over_tp) {
    const ParamDescriptions descriptions = default_descriptions(*child, over_tp);
    auto registered = register_module(name, std::move(child));
    describe_child(name, descriptions);
    return registered;
  }

  /// The same with a description for each of its parameters. UsageError: a description that
  /// contradicts itself, or a name for which `child` has no parameter.
  template <class Child>
  auto register_described_module(const std::string& name, Child child,
                                 const ParamDescriptions& descriptions) {
    check_descriptions(*child, name, descriptions);
    auto registered = register_module(name, std::move(child));
    describe_child(name, descriptions);
    return registered;
  }

 private:
  static ParamDescriptions default_descriptions(const torch::nn::Module& child,
                                                GradientState over_tp);
  static void check_descriptions(const torch::nn::Module& child, const std::string& name,
                                 const ParamDescriptions& descriptions);
  void describe_child(const std::string& name, const ParamDescriptions& descriptions);

  ParamDescriptions descriptions_;
  std::map<std::string, AxisSizes> cut_by_;
  bool splits_sequence_ = false;
};

/// One parameter of a model.
struct NamedParameter {
  std::string name;  ///< dotted name from the root module, "decoder.layers.0.mlp.linear_fc1.weight"
  at::Tensor tensor;
  ParamDescription description;
  /// If DescribedModule::add() made it: by how many ranks it was cut. The fronts refuse a
  /// ParallelState that has other sizes.
  std::optional<AxisSizes> cut_by = {};
};

/// The description of a parameter that no DescribedModule describes: dense, replicated on every
/// axis, gradients complete over tp, weight decay unless it has fewer than two dimensions.
ParamDescription default_description(const at::Tensor& parameter);

/// All parameters of `module` in the order of their registration, frozen ones included. A tensor
/// that is registered more than once (a tied weight) appears once, under its first name. If several
/// modules describe a parameter, the innermost one counts.
///
/// If splits_sequence() holds for some module, the gradient over tp of a trained parameter without
/// a description is GradientState::undeclared, because it might be only this rank's term of a sum.
/// The fronts refuse such a parameter and name it.
std::vector<NamedParameter> collect_parameters(const torch::nn::Module& module);

/// Fills `local` with normal random values that depend on (seed, name, global index of the element)
/// alone, so that every layout starts from the same weights. `local` [any shape, any dtype, any
/// device] is the block that starts at `offset` (elements, one per dimension) of a tensor of shape
/// `global_shape`; `offset` empty means the whole tensor.
void fill_normal(at::Tensor& local, double standard_deviation, uint64_t seed, std::string_view name,
                 at::IntArrayRef global_shape, at::IntArrayRef offset = {});

}  // namespace lockstep
