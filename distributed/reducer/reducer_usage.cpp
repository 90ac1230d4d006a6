#include "lockstep/distributed/reducer_usage.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

namespace lockstep {

using torch::autograd::Node;

OutputGraphs::OutputGraphs(const std::vector<at::Tensor>& outputs) : known_(!outputs.empty()) {
  for (const at::Tensor& output : outputs)
    if (output.defined() && output.requires_grad())
      roots_.emplace_back(torch::autograd::impl::gradient_edge(output).function);
}

std::vector<std::shared_ptr<Node>> OutputGraphs::roots() const {
  std::vector<std::shared_ptr<Node>> living;
  for (const std::weak_ptr<Node>& root : roots_)
    if (std::shared_ptr<Node> node = root.lock()) living.push_back(std::move(node));
  return living;
}

ParameterUsage::ParameterUsage(const std::vector<NamedParameter>& params, ProcessGroup group)
    : group_(std::move(group)),
      reachable_(params.size(), 0),
      used_(params.size(), 0),
      counts_(params.size(), 0) {
  for (const NamedParameter& param : params)
    accumulators_.push_back(torch::autograd::impl::grad_accumulator(param.tensor));
}

bool ParameterUsage::search(const OutputGraphs& graphs) {
  if (!graphs.are_known()) {
    assume_all_ = true;
    return true;
  }
  std::unordered_map<const Node*, size_t> index;
  for (size_t i = 0; i < accumulators_.size(); ++i) index[accumulators_[i].get()] = i;
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> left;
  const auto visit = [&](const Node* node) {
    if (node && seen.insert(node).second) left.push_back(node);
  };
  const auto roots = graphs.roots();
  for (const std::shared_ptr<Node>& root : roots) visit(root.get());
  bool any = false;
  while (!left.empty()) {
    const Node* const node = left.back();
    left.pop_back();
    if (const auto found = index.find(node); found != index.end()) {
      reachable_[found->second] = 1;
      any = true;
    }
    for (const torch::autograd::Edge& edge : node->next_edges()) visit(edge.function.get());
  }
  return any;
}

void ParameterUsage::forget_search() {
  std::fill(reachable_.begin(), reachable_.end(), 0);
  assume_all_ = false;
}

std::vector<bool> ParameterUsage::needed_on_any_rank() const {
  const at::Tensor map = at::empty({static_cast<int64_t>(reachable_.size())}, at::kInt);
  int32_t* const values = map.mutable_data_ptr<int32_t>();
  for (size_t i = 0; i < reachable_.size(); ++i)
    values[i] = is_reachable(i) || is_used_here(i) ? 1 : 0;
  all_reduce(group_, map, ReduceOp::max, "reachable parameters").wait();
  return std::vector<bool>(values, values + reachable_.size());
}

void ParameterUsage::clear() { std::fill(used_.begin(), used_.end(), 0); }

void ParameterUsage::start_count() {
  counting_ = at::empty({static_cast<int64_t>(used_.size())}, at::kInt);
  std::copy(used_.begin(), used_.end(), counting_.mutable_data_ptr<int32_t>());
  work_ = all_reduce(group_, counting_, ReduceOp::sum, "used parameters");
}

void ParameterUsage::finish_count() {
  if (!counting_.defined()) return;
  work_.wait();
  const int32_t* const values = counting_.const_data_ptr<int32_t>();
  counts_.assign(values, values + counts_.size());
  counting_ = at::Tensor();
}

}  // namespace lockstep
