#include "lockstep/distributed/model_units.h"

#include <algorithm>
#include <functional>
#include <map>

namespace lockstep {
namespace {

bool holds_params(const ModuleTree& module) {
  return module.num_params > 0 ||
         std::any_of(module.children.begin(), module.children.end(), holds_params);
}

bool is_list(const ModuleTree& module) {
  bool any = false;
  for (const ModuleTree& child : module.children) {
    if (!holds_params(child)) continue;
    if (!child.numbered) return false;
    any = true;
  }
  return any;
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

std::vector<UnitPiece> unit_pieces(const std::vector<LayoutParam>& params,
                                   const std::vector<int64_t>& units,
                                   const LayoutOptions& options) {
  std::map<int64_t, std::vector<int64_t>, std::greater<>> of_unit;
  for (size_t i = 0; i < params.size(); ++i)
    of_unit[units.empty() ? 0 : units[i]].push_back(static_cast<int64_t>(i));
  std::vector<UnitPiece> pieces;
  for (const auto& [unit, members] : of_unit) {
    std::vector<LayoutParam> sizes;
    for (const int64_t index : members) sizes.push_back(params[static_cast<size_t>(index)]);
    for (const ParamLayout::Bucket& bucket : compute_param_layout(sizes, options).buckets) {
      UnitPiece piece{units.empty() ? static_cast<int64_t>(pieces.size()) : unit, {}};
      for (const int64_t param : bucket.params)
        piece.params.push_back(members[static_cast<size_t>(param)]);
      std::sort(piece.params.begin(), piece.params.end());
      pieces.push_back(std::move(piece));
    }
  }
  return pieces;
}

bool is_number(std::string_view name) {
  return !name.empty() && name.find_first_not_of("0123456789") == std::string_view::npos;
}

std::vector<int64_t> number_units(const ModuleTree& root) {
  UnitNumbers numbers;
  numbers.walk(root);
  return numbers.take();
}

std::vector<int64_t> renumbered(std::vector<int64_t> units) {
  std::vector<int64_t> used = units;
  std::sort(used.begin(), used.end());
  used.erase(std::unique(used.begin(), used.end()), used.end());
  for (int64_t& unit : units)
    unit = std::lower_bound(used.begin(), used.end(), unit) - used.begin();
  return units;
}

}  // namespace lockstep
