#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/parallel_state/collective_record.h"
#include "lockstep/testing/model_check.h"
#include "lockstep/testing/rank_layout.h"

namespace lockstep::testing {

/// What a rank communicates in a training step, in the order in which it does.
struct StepCommunication {
  std::vector<std::vector<CollectiveRecord>> of_rank;

  /// Calls of `operation` over groups named `group` by `rank`, and the bytes of their inputs.
  /// `operation`: "all_reduce", the word before any parentheses. Empty: any.
  struct Total {
    int64_t calls = 0;
    int64_t bytes = 0;
    bool operator==(const Total&) const = default;
  };
  Total total(int64_t rank, const std::string& operation = "", const std::string& group = "") const;
};

/// "forward and backward  tp  all_reduce (sum)  2 calls  1024 bytes": a line for each kind of call
/// of `rank`.
std::string to_string(const StepCommunication& communication, int64_t rank);

/// What ranks as threads communicate in the second of two training steps on a layout: forward and
/// backward, reduction, norm and update. Groups of one rank send nothing. The model is trained as
/// in check_layouts(), but nothing is compared. Errors are rethrown. ConfigError: as
/// RankLayout::grids().
StepCommunication communication_of_step(const MakeModule& make_model, const StageLoss& loss,
                                        const RankLayout& layout, const CheckOptions& options = {});

template <class Make, class Loss>
StepCommunication communication_of_step(Make make_model, Loss loss, const RankLayout& layout,
                                        const CheckOptions& options = {}) {
  const auto [make, stage_loss] = erased(std::move(make_model), std::move(loss));
  return communication_of_step(make, stage_loss, layout, options);
}

}  // namespace lockstep::testing
