#pragma once

// Internal.

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/parameters.h"
#include "lockstep/parallel_state/collectives.h"

namespace torch::autograd {
struct Node;
}

namespace lockstep {

/// Where backwards start from the outputs of a forward. Does not keep the graph alive.
class OutputGraphs {
 public:
  /// No outputs: they are not known.
  explicit OutputGraphs(const std::vector<at::Tensor>& outputs);
  bool are_known() const { return known_; }
  /// Whether they are known and nobody keeps them any more, so that no backward can start there.
  /// Outputs without a graph tell nothing.
  bool are_gone() const { return known_ && !roots_.empty() && roots().empty(); }
  std::vector<std::shared_ptr<torch::autograd::Node>> roots() const;

 private:
  bool known_;
  std::vector<std::weak_ptr<torch::autograd::Node>> roots_;
};

/// Which parameters an iteration uses: as the graph of the outputs predicts, as hooks report on
/// this rank, and on how many ranks.
class ParameterUsage {
 public:
  ParameterUsage(const std::vector<NamedParameter>& params, ProcessGroup group);

  /// Walks `graphs` to the parameters and adds those that it reaches: all of them if the outputs
  /// are not known. Returns whether there are any.
  bool search(const OutputGraphs& graphs);
  void forget_search();
  bool is_reachable(size_t param) const { return assume_all_ || reachable_[param] != 0; }
  /// Whether any rank reaches each parameter or has used it since the last iteration. Blocks; all
  /// ranks call it.
  std::vector<bool> needed_on_any_rank() const;

  /// An iteration is reduced: nothing is used yet in the next one.
  void clear();
  void note(size_t param) { used_[param] = 1; }
  bool is_used_here(size_t param) const { return used_[param] != 0; }

  /// Starts to count over the ranks who uses which parameter. Finish it before anything else.
  void start_count();
  /// Waits for it; does nothing if none was started.
  void finish_count();
  /// The number of ranks on which each parameter was used, by the last count that finished.
  const std::vector<int32_t>& counts() const { return counts_; }

 private:
  ProcessGroup group_;
  std::vector<std::shared_ptr<torch::autograd::Node>> accumulators_;
  std::vector<char> reachable_;
  bool assume_all_ = false;
  std::vector<int32_t> used_;
  at::Tensor counting_;  ///< [params], Int: under way; else undefined
  Work work_;
  std::vector<int32_t> counts_;
};

}  // namespace lockstep
