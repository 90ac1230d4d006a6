#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

/// all_to_all_rows() in two halves, for what can be computed while the rows are under way. In
/// backward the rows of the gradient are under way between the same two points: they leave as soon
/// as the gradient of wait()'s result is complete, and are waited for where that of `x` is needed.
/// What was recorded between the two, autograd runs in the meantime, because it takes the node that
/// was recorded last of those that are ready.
class RowExchange {
 public:
  struct State;

  /// Starts; arguments, errors and what all ranks must do as of all_to_all_rows(). Backward starts
  /// too, so both halves of all exchanges must come in the same order on all ranks.
  RowExchange(const at::Tensor& x, const ProcessGroup& group,
              const std::vector<int64_t>& output_rows, const std::vector<int64_t>& input_rows,
              std::string_view label);
  ~RowExchange();
  RowExchange(const RowExchange&) = delete;
  RowExchange& operator=(const RowExchange&) = delete;

  /// The rows that came. Must be called once.
  at::Tensor wait();

 private:
  c10::intrusive_ptr<State> state_;  ///< null in a group of one rank
  at::Tensor rows_;                  ///< where autograd records; not to be read before wait()
};

}  // namespace lockstep
