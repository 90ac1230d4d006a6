#pragma once

// The programs that record_job() records, against a real run of ranks as threads.

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "lockstep/parallel_state/job_program.h"
#include "lockstep/parallel_state/planning.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/training/planned_layouts.h"
#include "lockstep/training/planned_job.h"
#include "lockstep/training/trainer.h"

namespace lockstep::testing {

/// A call as text. Equal calls have equal texts.
inline std::string text_of(const RankList& ranks, const std::string& operation,
                           const std::string& label, const std::string& dtype, int64_t numel) {
  return fmt::format("{} of {}, {} x {} over {}", operation, label, numel, dtype, ranks);
}

/// The calls of `rank` without comparisons. An exchange counts as a send and a receive.
inline std::vector<std::string> planned_calls(const JobProgram& job, const JobGroups& groups,
                                              int64_t rank) {
  using OperationKind = CollectiveOperation::Kind;
  std::vector<std::string> texts;
  const RankProgram& program = job.programs[job.program_of[static_cast<size_t>(rank)]];
  for (const ProgramEvent& event : program.events) {
    if (event.kind != ProgramEvent::Kind::start) continue;
    const ProgramCall& call = program.calls[event.value];
    const RankList& ranks = groups.ranks_of(rank, call.group);
    const auto add = [&](const CollectiveOperation& operation) {
      texts.push_back(text_of(ranks, to_string(operation), call.label, call.dtype, call.numel));
    };
    if (call.operation.kind == OperationKind::comparison) continue;
    if (call.operation.kind != OperationKind::exchange) {
      add(call.operation);
      continue;
    }
    const auto size = static_cast<int64_t>(ranks.size());
    const int64_t own = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
    const int64_t shift = own - program.groups[call.group].position + size;
    add({.kind = OperationKind::send, .position = (call.operation.position + shift) % size});
    add({.kind = OperationKind::receive, .position = (call.operation.source + shift) % size});
  }
  return texts;
}

inline std::vector<std::string> real_calls(const CollectiveLog& log, int64_t rank) {
  std::vector<std::string> texts;
  for (const CollectiveRecord& call : log.of_rank(rank))
    texts.push_back(
        text_of(call.ranks, call.operation, call.label, call.dtype,
                call.kind == CollectiveRecord::Kind::uneven_collective ? -1 : call.numel));
  return texts;
}

/// Expects that two steps and a validation of `world` ranks make the planned calls of each rank, in
/// that order, and that the plan's order is proven.
inline void expect_as_in_a_run(int64_t world, const Overrides& overrides) {
  SCOPED_TRACE(fmt::format("{} ranks, {}", world, fmt::join(overrides, " ")));
  const Config config = config_of(overrides);
  CollectiveLog log;
  RankThreadOptions options;
  options.sizes = parallel_options(config, c10::kCPU).sizes;
  options.timeout = std::chrono::seconds(60);
  options.log = &log;
  options.adjust = [&](int64_t, ParallelStateOptions& made) {
    made.create_all_gather_groups = config.parallel.create_all_gather_groups;
  };
  run_ranks(
      world,
      [&](const ParallelState& state) {
        Trainer trainer(config, state);
        for (int step = 0; step < 2; ++step) trainer.train_step();
        trainer.validate();
      },
      options);
  const JobProgram job = record_job(config, world);
  const JobGroups groups(job);
  for (int64_t rank = 0; rank < world; ++rank) {
    const auto planned = planned_calls(job, groups, rank), real = real_calls(log, rank);
    ASSERT_TRUE(world == 1 || real.size() > 10);
    for (size_t i = 0; i < std::max(planned.size(), real.size()); ++i)
      ASSERT_EQ(i < planned.size() ? planned[i] : "nothing", i < real.size() ? real[i] : "nothing")
          << "call " << i << " of rank " << rank << "\nplanned "
          << fmt::format("{}", fmt::join(planned.begin() + std::min(i, planned.size()),
                                         planned.begin() + std::min(i + 4, planned.size()), "\n  "))
          << "\nreal "
          << fmt::format("{}", fmt::join(real.begin() + std::min(i, real.size()),
                                         real.begin() + std::min(i + 4, real.size()), "\n  "));
  }
  const OrderVerdict verdict = prove_order(job);
  EXPECT_TRUE(verdict.ok()) << verdict.to_string();
}

}  // namespace lockstep::testing
