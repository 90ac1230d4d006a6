#include "lockstep/distributed/model_units.h"

#include <algorithm>

namespace lockstep {
namespace {

bool holds_params(const ModuleTree& module) {
  return module.num_params > 0 ||
         std::any_of(module.children.begin(), module.children.end(), holds_params);
}

bool is_list(const ModuleTree& module) {
  std::vector<const ModuleTree*> holders;
  for (const ModuleTree& child : module.children)
    if (holds_params(child)) holders.push_back(&child);
  return holders.size() >= 2 &&
         std::all_of(holders.begin(), holders.end(), [&](const ModuleTree* child) {
           return child->kind == holders.front()->kind;
         });
}

bool contains_list(const ModuleTree& module) {
  return is_list(module) ||
         std::any_of(module.children.begin(), module.children.end(), contains_list);
}

class UnitNumbers {
 public:
  void walk(const ModuleTree& module) {
    if (module.num_params > 0) add(module.num_params, next_++);
    const bool list = is_list(module);
    for (const ModuleTree& child : module.children) {
      if (!list && contains_list(child)) {
        walk(child);
      } else if (holds_params(child)) {
        add_all(child);
        ++next_;
      }
    }
  }
  std::vector<int64_t> take() { return std::move(numbers_); }

 private:
  void add(int64_t count, int64_t unit) {
    numbers_.insert(numbers_.end(), static_cast<size_t>(count), unit);
  }
  void add_all(const ModuleTree& module) {
    add(module.num_params, next_);
    for (const ModuleTree& child : module.children) add_all(child);
  }

  std::vector<int64_t> numbers_;
  int64_t next_ = 0;
};

}  // namespace

std::vector<int64_t> number_units(const ModuleTree& root) {
  UnitNumbers numbers;
  numbers.walk(root);
  return numbers.take();
}

}  // namespace lockstep
