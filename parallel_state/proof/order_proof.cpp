#include "lockstep/parallel_state/order_proof.h"

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/job_program.h"
#include "lockstep/parallel_state/operation_matching.h"
#include "lockstep/parallel_state/order_simulation.h"

namespace lockstep {

std::string OrderVerdict::to_string() const {
  if (ok()) return "";
  const bool stuck = reason == Reason::deadlock;
  return fmt::format("{}: {}",
                     stuck ? fmt::format("deadlock under the rules of {}", rules) : "mismatch",
                     fmt::join(operations, "; "));
}

OrderVerdict prove_order(const JobProgram& job) {
  const JobGroups groups(job);
  OrderVerdict verdict;
  if (auto found = find_mismatch(job, groups)) {
    verdict = *found;
  } else {
    for (const auto rules : {OrderSimulation::Rules::nccl, OrderSimulation::Rules::gloo}) {
      auto stuck = OrderSimulation(job, groups, rules).run();
      if (!stuck) continue;
      verdict = *stuck;
      break;
    }
  }
  verdict.classes = static_cast<int64_t>(groups.classes().size());
  verdict.num_operations = job.num_operations();
  return verdict;
}

}  // namespace lockstep
