#include "lockstep/pipeline/split_backward.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include "lockstep/core/gradient_capture.h"

namespace lockstep {
namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Node;
using torch::autograd::variable_list;

/// `pass`: see OuterBackward.
variable_list run_engine(const edge_list& roots, const variable_list& grads, bool accumulate,
                         int64_t pass, const edge_list& outputs = {}) {
  const CapturesAccumulate captures({.pass = pass, .in_parts = true});
  return torch::autograd::Engine::get_default_engine().execute(
      roots, grads, /*keep_graph=*/true, /*create_graph=*/false, accumulate, outputs);
}

/// `root` and the nodes below it, each before those that receive its gradients.
std::vector<Node*> nodes_in_order(Node* root) {
  std::vector<Node*> finished;
  std::unordered_set<Node*> seen = {root};
  std::vector<std::pair<Node*, size_t>> stack = {{root, 0}};
  while (!stack.empty()) {
    auto& [node, next] = stack.back();
    if (next == node->next_edges().size()) {
      finished.push_back(node);
      stack.pop_back();
      continue;
    }
    Node* const below = node->next_edge(next++).function.get();
    if (below != nullptr && seen.insert(below).second) stack.emplace_back(below, 0);
  }
  std::reverse(finished.begin(), finished.end());
  return finished;
}

bool has_tensor_hooks(Node& node) {
  return !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty();
}

bool is_leaf(const Node* node) {
  return dynamic_cast<const torch::autograd::AccumulateGrad*>(node) != nullptr;
}

/// The leaf farthest from the root.
Node* deepest_leaf(const std::vector<Node*>& nodes) {
  std::unordered_map<Node*, int64_t> depth;
  Node* deepest = nullptr;
  for (Node* const node : nodes) {
    if (is_leaf(node) && (deepest == nullptr || depth[node] > depth[deepest])) deepest = node;
    const int64_t below = depth[node] + 1;
    for (const Edge& edge : node->next_edges())
      if (edge.is_valid()) depth[edge.function.get()] = std::max(depth[edge.function.get()], below);
  }
  return deepest;
}

}  // namespace

struct SplitBackward::Graph {
  /// Gradients that reach one operation in the first part.
  struct Arrived {
    variable_list grads;
    int64_t pass = -1;
    bool listening = true;
  };

  class Listener : public torch::autograd::FunctionPreHook {
   public:
    explicit Listener(std::shared_ptr<Arrived> arrived) : arrived_(std::move(arrived)) {}
    variable_list operator()(const variable_list& grads) override {
      if (!arrived_->listening) return grads;
      arrived_->grads = grads;
      arrived_->pass = torch::autograd::get_current_graph_task_id();
      return grads;
    }

   private:
    std::shared_ptr<Arrived> arrived_;
  };

  /// An operation on the way to the input that also leads to parameters elsewhere.
  struct Fork {
    std::shared_ptr<Node> node;
    edge_list sides;
    std::shared_ptr<Arrived> arrived = std::make_shared<Arrived>();
  };

  Graph(const at::Tensor& output, const at::Tensor& input)
      : root(torch::autograd::impl::gradient_edge(output)), has_input(input.defined()) {
    const std::vector<Node*> nodes = nodes_in_order(root.function.get());
    if (has_input)
      target = torch::autograd::impl::gradient_edge(input);
    else if (Node* const leaf = deepest_leaf(nodes))
      target = Edge(leaf->getptr(), 0);
    mark_way(nodes, target.function.get());
    find_forks(nodes);
  }

  void mark_way(const std::vector<Node*>& nodes, Node* end) {
    for (auto node = nodes.rbegin(); node != nodes.rend(); ++node) {
      const auto& edges = (*node)->next_edges();
      if (*node == end || std::any_of(edges.begin(), edges.end(), [&](const Edge& edge) {
            return edge.is_valid() && on_way.count(edge.function.get()) > 0;
          }))
        on_way.insert(*node);
    }
  }

  void find_forks(const std::vector<Node*>& nodes) {
    std::unordered_map<Node*, Node*> parent_of;
    std::unordered_set<Node*> shared;
    for (Node* const node : nodes)
      for (const Edge& edge : node->next_edges())
        if (edge.is_valid() && parent_of.emplace(edge.function.get(), node).first->second != node)
          shared.insert(edge.function.get());
    for (Node* const node : nodes) {
      if (on_way.count(node) == 0) continue;
      Fork fork = {node->getptr(), {}};
      for (const Edge& edge : node->next_edges()) {
        if (!edge.is_valid() || on_way.count(edge.function.get()) > 0) continue;
        if (std::find(fork.sides.begin(), fork.sides.end(), edge) == fork.sides.end())
          fork.sides.push_back(edge);
        splits = splits && shared.count(edge.function.get()) == 0;
      }
      if (!fork.sides.empty()) forks.push_back(std::move(fork));
    }
    splits = splits && on_way.count(root.function.get()) > 0;
  }

  /// Whether a hook would see only a part of the gradients, or see them twice: forks run in both
  /// parts, and the engine calls the hooks of a tensor also where it only captures its gradient.
  bool repeats_hooks() const {
    if (!has_input && has_tensor_hooks(*target.function)) return true;
    return std::any_of(forks.begin(), forks.end(), [](const Fork& fork) {
      Node& node = *fork.node;
      const auto is_foreign = [](const auto& hook) {
        return dynamic_cast<const Listener*>(hook.get()) == nullptr;
      };
      const auto& pre = node.pre_hooks();
      return has_tensor_hooks(node) || !node.post_hooks().empty() ||
             std::any_of(pre.begin(), pre.end(), is_foreign) ||
             std::any_of(fork.sides.begin(), fork.sides.end(),
                         [](const Edge& side) { return has_tensor_hooks(*side.function); });
    });
  }

  Edge root, target;
  bool has_input;
  std::unordered_set<Node*> on_way;
  std::vector<Fork> forks;
  bool splits = true;
  at::Tensor target_grad;
  int64_t pass = -1;  ///< the first part, once it is over
};

SplitBackward::SplitBackward(const at::Tensor& output, const at::Tensor& input)
    : graph_(std::make_unique<Graph>(output, input)) {}

SplitBackward::~SplitBackward() = default;

at::Tensor SplitBackward::input_part(const at::Tensor& grad) {
  Graph& graph = *graph_;
  if (!graph.splits || graph.repeats_hooks()) {
    const at::Tensor input =
        graph.has_input
            ? static_cast<torch::autograd::AccumulateGrad&>(*graph.target.function).variable
            : at::Tensor();
    run_engine({graph.root}, {grad}, /*accumulate=*/true, graph.pass);
    graph_ = nullptr;
    return input.defined() ? input.grad() : input;
  }
  const auto first = std::make_shared<Graph::Arrived>();
  graph.root.function->add_pre_hook(std::make_unique<Graph::Listener>(first));
  for (auto& fork : graph.forks)
    fork.node->add_pre_hook(std::make_unique<Graph::Listener>(fork.arrived));
  at::Tensor reached =
      run_engine({graph.root}, {grad}, /*accumulate=*/false, graph.pass, {graph.target}).front();
  for (auto& fork : graph.forks) fork.arrived->listening = false;
  graph.pass = first->pass;
  *first = {.grads = {}, .pass = -1, .listening = false};
  if (graph.has_input) return reached;
  graph.target_grad = std::move(reached);
  return {};
}

void SplitBackward::weight_part() {
  if (!graph_) return;
  edge_list leaves, in_place;
  variable_list grads;
  const auto add = [&](const Edge& edge, const at::Tensor& grad) {
    if (grad.defined()) {
      leaves.push_back(edge);
      grads.push_back(grad);
    } else if (is_leaf(edge.function.get())) {
      in_place.push_back(edge);
    }
  };
  for (auto& fork : graph_->forks) {
    edge_list roots;
    variable_list arrived;
    for (size_t i = 0; i < fork.arrived->grads.size(); ++i) {
      if (!fork.arrived->grads[i].defined()) continue;
      roots.emplace_back(fork.node, static_cast<uint32_t>(i));
      arrived.push_back(fork.arrived->grads[i]);
    }
    variable_list found(fork.sides.size());
    if (!roots.empty())
      found = run_engine(roots, arrived, /*accumulate=*/false, graph_->pass, fork.sides);
    for (size_t i = 0; i < found.size(); ++i) add(fork.sides[i], found[i]);
    fork.arrived->grads.clear();
  }
  if (!graph_->has_input) add(graph_->target, graph_->target_grad);
  if (!leaves.empty()) run_engine(leaves, grads, /*accumulate=*/true, graph_->pass);
  const CapturesAccumulate belongs({.pass = graph_->pass, .in_parts = true});
  for (const Edge& leaf : in_place) (*leaf.function)(variable_list(1));
  graph_ = nullptr;
}

}  // namespace lockstep
