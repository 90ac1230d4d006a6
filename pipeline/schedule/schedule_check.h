#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/pipeline/schedule.h"

/// Whether a schedule is valid, and how much memory it needs.
namespace lockstep {

/// Throws UsageError, naming rank and task, unless every rank has each task of its chunks exactly
/// once and no other, each backward after its forward, each weight task after its backward, and,
/// when all ranks run, every task gets what it waits for. (A schedule that passes may still
/// deadlock if transfers are ordered badly: see communication_steps.h.)
void check_schedule(const PipelineSchedule& schedule);

/// The part of check_schedule() that looks at one rank at a time.
void check_tasks(const PipelineSchedule& schedule);

/// For each rank, the largest number of activations that are alive at once, in units of one
/// micro-batch of one chunk (1/V of the rank's layers). An activation is alive from its forward
/// until its backward is done or, if backward is split, its weight part. 1F1B: min(P - rank, M);
/// GPipe: M; ZB-H1: min(P, M). With forwards only, nothing is kept: 1.
std::vector<int64_t> peak_live_microbatches(const PipelineSchedule& schedule);

}  // namespace lockstep
