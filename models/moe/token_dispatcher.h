#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

#include "lockstep/core/config.h"
#include "lockstep/models/grouped_linear.h"
#include "lockstep/models/routing.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Runs the experts of a rank: tokens [rows, hidden], where `groups` says which rows each of its
/// experts has -> the same shape, the rank's term of a sum over etp. Rows of no expert may hold
/// anything, in backward too.
using ExpertFunction =
    std::function<at::Tensor(const at::Tensor& tokens, const RowGroupsPtr& groups)>;

/// Sends tokens to their experts and returns the experts' outputs. The experts are on the ranks of
/// ep, one slice per rank, and each expert's matrices are on those of etp; so the tokens of a group
/// tp-ep (expert-tp x ep) go to that group's ranks.
class MoETokenDispatcher {
 public:
  virtual ~MoETokenDispatcher() = default;

  /// The sum of the outputs of each token's experts, by their weights: `tokens` [tokens, hidden],
  /// which only this rank has -> the same shape. A collective over tp-ep. `meanwhile` is called
  /// once before the experts: by alltoall while the tokens are on their way to them, and what
  /// autograd records in it runs in backward while their gradients are on their way back.
  virtual at::Tensor run(const at::Tensor& tokens, const Routing& routing,
                         const ExpertFunction& experts,
                         const std::function<void()>& meanwhile) const = 0;
};

/// alltoall: tokens are sorted by expert, the numbers exchanged (one all-gather of [num_experts]),
/// and each token is sent to the ranks of its experts, the ones next to each other in one message;
/// one all-to-all there and one back. allgather: all tokens and weights are gathered, each rank
/// computes its experts' part, and a reduce-scatter adds the parts; all ranks must have the same
/// number of tokens. Connects the group.
///
/// On a device with expert parallelism, the host waits for the device once per call, for the
/// numbers that the messages' sizes depend on or, with allgather, the experts' rows; in a
/// recomputed function it waits only in the first run. Without expert parallelism it does not wait:
/// there are as many rows as the routing may have at most, those after the last expert's are
/// unused, and with alltoall, too, all ranks must have the same number of tokens.
std::shared_ptr<const MoETokenDispatcher> make_token_dispatcher(TokenDispatcher type,
                                                                const ParallelState& state,
                                                                int64_t num_experts);

}  // namespace lockstep
