#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

/// all_to_all_rows() in two halves, to overlap the exchange with computation. In backward the
/// gradient's rows are in flight between the same two points: they are sent as soon as the gradient
/// of wait()'s result is complete, and waited for where the gradient of `x` is needed. In the
/// meantime autograd runs what was recorded between the two halves, because it always picks the
/// most recently recorded node that is ready.
class RowExchange {
 public:
  struct State;

  /// Starts the exchange. Arguments, errors and the duties of all ranks are those of
  /// all_to_all_rows(). Backward starts exchanges too, so both halves of all exchanges must come in
  /// the same order on all ranks.
  RowExchange(const at::Tensor& x, const ProcessGroup& group,
              const std::vector<int64_t>& output_rows, const std::vector<int64_t>& input_rows,
              std::string_view label);
  ~RowExchange();
  RowExchange(const RowExchange&) = delete;
  RowExchange& operator=(const RowExchange&) = delete;

  /// Returns the received rows. Must be called once.
  at::Tensor wait();

 private:
  c10::intrusive_ptr<State> state_;  ///< null in a group of one rank
  at::Tensor rows_;                  ///< where autograd records; not to be read before wait()
};

}  // namespace lockstep
