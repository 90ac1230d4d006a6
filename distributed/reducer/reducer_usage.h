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

/// Which parameters an iteration uses: as the graph of the outputs predicts, as hooks report on
/// this rank, and on how many ranks.
class ParameterUsage {
 public:
  ParameterUsage(const std::vector<NamedParameter>& params, ProcessGroup group);

  /// Walks the graph from `outputs` to the parameters and adds those that it reaches.
  void search(const std::vector<at::Tensor>& outputs);
  /// All parameters may be reached.
  void assume_all() { assume_all_ = true; }
  void forget_search();
  bool is_reachable(size_t param) const { return assume_all_ || reachable_[param] != 0; }
  bool any_reachable() const;
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
