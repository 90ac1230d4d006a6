#include "lockstep/testing/step_communication.h"

#include <map>
#include <mutex>

#include "lockstep/core/check.h"
#include "lockstep/testing/rank_threads.h"
#include "lockstep/testing/trained_rank.h"

namespace lockstep::testing {
namespace {

bool is_operation(const CollectiveRecord& call, const std::string& operation) {
  return operation.empty() || call.operation == operation ||
         call.operation.starts_with(operation + " ");
}

}  // namespace

StepCommunication::Total StepCommunication::total(int64_t rank, const std::string& operation,
                                                  const std::string& group) const {
  Total total;
  for (const CollectiveRecord& call : of_rank.at(static_cast<size_t>(rank))) {
    if (!is_operation(call, operation) || (!group.empty() && call.group != group)) continue;
    ++total.calls;
    total.bytes += call.bytes;
  }
  return total;
}

std::string to_string(const StepCommunication& communication, int64_t rank) {
  using Total = StepCommunication::Total;
  std::map<std::pair<std::string, std::string>, Total> totals;
  std::vector<std::pair<std::string, std::string>> order;
  for (const CollectiveRecord& call : communication.of_rank.at(static_cast<size_t>(rank))) {
    const auto [entry, is_new] = totals.try_emplace({call.group, call.operation});
    if (is_new) order.push_back(entry->first);
    ++entry->second.calls;
    entry->second.bytes += call.bytes;
  }
  std::string text;
  for (const auto& kind : order)
    text += fmt::format("{:12}  {:22}  {:>4} calls  {:>10} bytes\n", kind.first, kind.second,
                        totals[kind].calls, totals[kind].bytes);
  return text;
}

StepCommunication communication_of_step(const MakeModule& make_model, const StageLoss& loss,
                                        const RankLayout& layout, const CheckOptions& options) {
  layout.grids();
  StepCommunication result;
  result.of_rank.resize(static_cast<size_t>(layout.ranks));
  std::vector<char> counting(static_cast<size_t>(layout.ranks), 0);
  RankThreadOptions threads;
  threads.sizes = layout.sizes;
  threads.timeout = options.timeout;
  threads.observer = [&](const CollectiveRecord& call) {  // on the rank's own thread
    const auto rank = static_cast<size_t>(call.rank);
    if (counting[rank] && call.label != kLossOfStep) result.of_rank[rank].push_back(call);
  };
  const WholeWeights weights = weights_in_one_process(make_model, options.seed);
  run_ranks(
      layout.ranks,
      [&](const ParallelState& state) {
        TrainedRank rank(make_model, loss, layout, options, state, weights);
        rank.step(0);
        counting[static_cast<size_t>(state.rank())] = 1;
        rank.step(1);
        counting[static_cast<size_t>(state.rank())] = 0;
      },
      threads);
  return result;
}

}  // namespace lockstep::testing
