#include "lockstep/distributed/module_units.h"

#include <map>

#include "lockstep/distributed/model_units.h"

namespace lockstep {
namespace {

ModuleTree tree_of(const torch::nn::Module& module, bool numbered,
                   std::vector<const c10::TensorImpl*>& tensors) {
  ModuleTree tree{.numbered = numbered, .num_params = 0, .children = {}};
  for (const auto& item : module.named_parameters(/*recurse=*/false)) {
    tensors.push_back(item.value().unsafeGetTensorImpl());
    ++tree.num_params;
  }
  for (const auto& child : module.named_children())
    tree.children.push_back(tree_of(*child.value(), is_number(child.key()), tensors));
  return tree;
}

}  // namespace

std::vector<int64_t> units_of(const torch::nn::Module& module,
                              const std::vector<NamedParameter>& parameters) {
  std::vector<const c10::TensorImpl*> tensors;
  const std::vector<int64_t> numbers = number_units(tree_of(module, /*numbered=*/false, tensors));
  std::map<const c10::TensorImpl*, int64_t> units;
  for (size_t i = 0; i < tensors.size(); ++i) units.emplace(tensors[i], numbers[i]);
  std::vector<int64_t> result;
  for (const NamedParameter& param : parameters)
    result.push_back(units.at(param.tensor.unsafeGetTensorImpl()));
  return result;
}

}  // namespace lockstep
