#include "lockstep/parallel_state/desync_check.h"

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/operation.h"

namespace lockstep {
namespace {

/// A comparison of one group that is under way. It bypasses the ledger that it compares.
class Comparison {
 public:
  explicit Comparison(const ProcessGroup& group) {
    operation_.group = group.shared_state();
    operation_.called = {CollectiveOperation::Kind::comparison};
    operation_.label = communicator().ledger().share_label("", "what the ranks have done");
    operation_.numel = 2;
    operation_.dtype = at::toString(at::kLong);
    const CollectiveLedger::State state = communicator().ledger().state();
    mine_ = at::tensor({state.sequence, static_cast<int64_t>(state.fingerprint)}, at::kLong);
    all_ = at::empty({group.size(), 2}, at::kLong);
    work_ = start_operation(operation_, [&] {
      return communicator().transport(c10::kCPU).all_gather({all_}, {mine_}, Transport::kUncounted);
    });
  }

  void finish() {
    work_.wait();
    if (at::equal(all_, mine_.expand_as(all_))) return;
    fail_operation(operation_, "the ranks have called different operations");
  }

 private:
  Communicator& communicator() const { return *operation_.group->communicator; }

  Work::Operation operation_;
  at::Tensor mine_, all_;
  Work work_;
};

}  // namespace

void check_in_step(const std::vector<ProcessGroup>& groups) {
  std::vector<Comparison> comparisons;
  for (const ProcessGroup& group : groups) comparisons.emplace_back(group);
  for (Comparison& comparison : comparisons) comparison.finish();
}

}  // namespace lockstep
