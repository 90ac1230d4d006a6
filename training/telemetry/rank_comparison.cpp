#include "lockstep/training/rank_comparison.h"

#include <algorithm>
#include <utility>

namespace lockstep {
namespace {

double own_work(const StepTimes& times) { return times.total() - times[StepPart::communication]; }

double lower_median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

SlowestRank slowest_rank(const std::vector<StepTimes>& of_ranks) {
  const auto slowest =
      std::max_element(of_ranks.begin(), of_ranks.end(),
                       [](const auto& a, const auto& b) { return own_work(a) < own_work(b); });
  SlowestRank result = {
      .rank = slowest - of_ranks.begin(), .ms = own_work(*slowest), .times = *slowest};
  bool first = true;
  for (size_t i = 0; i < kStepParts; ++i) {
    const auto part = static_cast<StepPart>(i);
    if (part == StepPart::communication) continue;
    std::vector<double> values;
    for (const StepTimes& times : of_ranks) values.push_back(times[part]);
    const double behind = (*slowest)[part] - lower_median(std::move(values));
    if (!first && behind <= result.behind_ms) continue;
    result.part = part;
    result.behind_ms = behind;
    first = false;
  }
  return result;
}

void RankTimes::add(int64_t iteration, const StepTimes& times) {
  if (count_++ == 0) first_ = iteration;
  last_ = iteration;
  for (size_t i = 0; i < kStepParts; ++i) sum_.ms[i] += times.ms[i];
}

void RankTimes::take(std::span<double> payload, int64_t rank) {
  std::fill(payload.begin(), payload.end(), 0);
  const auto own = payload.subspan(static_cast<size_t>(rank) * kStepParts, kStepParts);
  for (size_t i = 0; i < kStepParts; ++i) own[i] = sum_.ms[i] / static_cast<double>(count_);
  sum_ = {};
  count_ = 0;
  taken_first_ = first_;
  taken_last_ = last_;
}

SlowestRank RankTimes::compare(std::span<const double> sum) const {
  std::vector<StepTimes> of_ranks(sum.size() / kStepParts);
  for (size_t i = 0; i < sum.size(); ++i) of_ranks[i / kStepParts].ms[i % kStepParts] = sum[i];
  SlowestRank result = slowest_rank(of_ranks);
  result.first_iteration = taken_first_;
  result.last_iteration = taken_last_;
  return result;
}

}  // namespace lockstep
