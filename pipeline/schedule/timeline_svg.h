#pragma once

#include <ostream>
#include <string>

#include "lockstep/pipeline/schedule.h"
#include "lockstep/pipeline/simulation.h"

namespace lockstep {

/// Draws `timeline` of `schedule` as an SVG document: a row for each rank, time to the right, a box
/// for each task with the number of its micro-batch (if it fits), and its name and times on hover.
/// Forwards, backwards and weight parts differ in colour, chunks in shade; idle time is empty.
/// `title` is drawn above. UsageError: times that are not those of the schedule's tasks.
void write_timeline_svg(std::ostream& out, const std::string& title,
                        const PipelineSchedule& schedule, const Timeline& timeline);

}  // namespace lockstep
